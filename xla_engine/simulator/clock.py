"""Time in a simulation: what the host and the device have done when, by a cost model."""

from __future__ import annotations

from collections import deque
from itertools import cycle

from xla_engine.simulator.cost import CostModel, DeviceWork, HostWork


class Clock:
    """The device runs its steps in order; a read waits for its step.

    now: seconds, as the host sees them.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.now = 0.0
        self._free = 0.0  # when the device has done all it was given
        self._done: deque[float] = deque()  # when each step not yet read is over
        self._noise = cycle(cost.noise)

    def wait(self, until: float) -> bool:
        """Nothing is to be done before; false if it is not in the future."""
        late = until <= self.now
        self.now = max(self.now, until)
        return not late

    def submit(self) -> None:
        """The host takes a request."""
        self._work(self.cost.submit)

    def start(self, host: HostWork, device: DeviceWork) -> None:
        """The host comes to a step and starts it."""
        self._work(self.cost.host(host))
        self._run(self.cost.device(device))

    def read(self) -> float:
        """The oldest step not yet read is over; returns when."""
        self.now = max(self.now, self._done.popleft())
        return self.now

    def steady(
        self, steps: int, until: float, *, first_host: float, host: float, device: float, growth: float
    ) -> list[float]:
        """The times at which steps are read that go on as before, at most `steps` and none started from `until` on.

        Seconds: first_host of the host before the first of them, host before each later one; device of the first step,
        by growth more of each later one.
        """
        reads: list[float] = []
        while len(reads) < steps and self.now < until:
            self._work(host if reads else first_host)
            self._run(device)
            device += growth
            reads.append(self.read())
        return reads

    def _work(self, seconds: float) -> None:
        """The host is busy, and keeps the device from its steps meanwhile."""
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
