"""The queue of requests that have no slot: those that never had one, and those that lost it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler import policy
from scheduler.request import Status
from scheduler.state import RequestState

Place = tuple[int, int]


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not taken and nothing changed."""

    code = "queue_full"


class WaitingQueue:
    """Order of `policy.place`, with push, pop and removal in logarithmic time.

    max_waiting: most requests to take at the back, None for no bound. priority_aging: as in `SchedulerConfig`.
    """

    def __init__(self, max_waiting: int | None = None, priority_aging: int = 1) -> None:
        self.max_waiting = max_waiting
        self._aging = priority_aging
        self._heap: list[tuple[Place, RequestState]] = []  # and of the past
        self._places: dict[str, Place] = {}  # of those who wait, by request

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for place, state in sorted(self._heap) if self._waits(place, state))

    def place(self, state: RequestState) -> Place:
        """A request's place in line; the lowest goes first. It is the same whether the request waits or runs."""
        return policy.place(state.turn, state.request.priority, self._aging)

    def _waits(self, place: Place, state: RequestState) -> bool:
        # Places are distinct, so an entry of the past is not taken for one of the same request that came back.
        return self._places.get(state.request_id) == place

    @property
    def head(self) -> RequestState:
        """The request that goes next. Raises IndexError when empty."""
        while not self._waits(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def push(self, state: RequestState) -> None:
        """Put a new request in its place. Raises QueueFullError."""
        if self.max_waiting is not None and len(self) >= self.max_waiting:
            raise QueueFullError(
                f"request {state.request_id!r} was not taken: {len(self)} wait and max_waiting is "
                f"{self.max_waiting}; submit it again after a step, abort one that waits, or raise the bound"
            )
        self.put_back(state)

    def put_back(self, state: RequestState) -> None:
        """Put a request in its place, whatever the bound: it was taken once."""
        assert state.request_id not in self._places, f"request {state.request_id!r} waits already"
        self._places[state.request_id] = self.place(state)
        heapq.heappush(self._heap, (self.place(state), state))

    def pop(self) -> RequestState:
        """Take the request that goes next. Raises IndexError when empty."""
        state = self.head
        heapq.heappop(self._heap)  # it may come back, to the same place
        del self._places[state.request_id]
        return state

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands. Raises KeyError when it does not wait."""
        del self._places[state.request_id]
        if len(self._heap) > 4 * len(self._places) + 64:
            self._heap = [entry for entry in self._heap if self._waits(*entry)]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless everything in here waits, in its place."""
        waiting = {state.request_id: place for place, state in self._heap if self._waits(place, state)}
        if waiting != self._places:
            raise AssertionError(f"the heap has {waiting}, not {self._places}")
        for state in self:
            if state.status not in (Status.WAITING, Status.PARKED):
                raise AssertionError(f"in the queue: {state}")
