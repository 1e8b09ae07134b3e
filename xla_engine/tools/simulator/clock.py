"""The clock of a simulation: host and device take the time that a cost model says."""

from collections import deque
from collections.abc import Iterator
from itertools import cycle

from xla_engine.tools.simulator.cost import CostModel, DeviceWork, HostWork


class SimulatedClock:
    """Advances through a host that starts and reads steps, and a device that runs them in order.

    now: seconds, as the host sees them.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.now = 0.0
        self._free = 0.0  # when the device has finished all its steps
        self._done: deque[float] = deque()  # when each unread step ends
        self._noise = cycle(cost.noise)

    def wait(self, until: float) -> bool:
        """Let the host be idle until a time; false if that has passed."""
        late = until <= self.now
        self.now = max(self.now, until)
        return not late

    def submit(self) -> None:
        """Let the host accept a request."""
        self._work(self.cost.submit)

    def start(self, host: HostWork, device: DeviceWork) -> None:
        """Let the host prepare a step and start it."""
        self.run(host, self.cost.device(device))

    def run(self, host: HostWork, seconds: float) -> None:
        """Let the host prepare a step and start it; `seconds` is its time on the device."""
        self._work(self.cost.host(host))
        self._run(seconds)

    def read(self) -> float:
        """Let the host wait for the oldest unread step; returns the time at which it ends."""
        self.now = max(self.now, self._done.popleft())
        return self.now

    def steady(
        self, steps: int, until: float, *, first_host: float, host: float, device: Iterator[float]
    ) -> list[float]:
        """Run steps that are read one by one; returns the times at which they are.

        steps: at most this many. until: no step starts at this time or later.
        first_host, host: seconds the host takes before the first step, and before each later one.
        device: seconds that each step takes on the device.
        """
        reads: list[float] = []
        while len(reads) < steps and self.now < until:
            self._work(host if reads else first_host)
            self._run(next(device))
            reads.append(self.read())
        return reads

    def _work(self, seconds: float) -> None:
        """Let the host work, which slows down what the device runs meanwhile."""
        if (busy := self._free - self.now) > 0:
            delay = self.cost.overlap * min(seconds, busy)
            self._free += delay
            for at, over in enumerate(self._done):
                if over > self.now:
                    self._done[at] = over + delay
        self.now += seconds

    def _run(self, seconds: float) -> None:
        self._free = max(self._free, self.now) + max(seconds + next(self._noise), 0.0)
        self._done.append(self._free)
