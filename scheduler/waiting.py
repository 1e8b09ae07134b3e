"""The queue of requests that have no slot yet."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from scheduler import policy
from scheduler.request import Status
from scheduler.state import RequestState


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not taken and nothing changed."""

    code = "queue_full"


class WaitingQueue:
    """Order of `policy.place`, with push, pop and removal in constant time for a given number of priorities in use.

    max_waiting: most requests to hold, None for no bound. priority_aging: as in `SchedulerConfig`.
    """

    def __init__(self, max_waiting: int | None = None, priority_aging: int = 1) -> None:
        self.max_waiting = max_waiting
        self._aging = priority_aging
        # By priority, in order of arrival; none is empty. OrderedDicts, because finding the first key of a dict
        # scans all that were deleted before it.
        self._classes: dict[int, OrderedDict[str, RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[RequestState]:
        return heapq.merge(*(states.values() for states in self._classes.values()), key=self._place)

    def _place(self, state: RequestState) -> tuple[int, int]:
        return policy.place(state.arrival, state.request.priority, self._aging)

    @property
    def head(self) -> RequestState:
        """The request that goes next. Raises ValueError when empty."""
        return min((next(iter(states.values())) for states in self._classes.values()), key=self._place)

    def push(self, state: RequestState) -> None:
        """Put a request in its place; it is the latest arrival of its priority. Raises QueueFullError."""
        if self.max_waiting is not None and len(self) >= self.max_waiting:
            raise QueueFullError(
                f"request {state.request_id!r} was not taken: {len(self)} wait and max_waiting is "
                f"{self.max_waiting}; submit it again after a step, abort one that waits, or raise the bound"
            )
        states = self._classes.setdefault(state.request.priority, OrderedDict())
        assert state.request_id not in states, f"request {state.request_id!r} waits already"
        states[state.request_id] = state

    def pop(self) -> RequestState:
        """Take the request that goes next. Raises ValueError when empty."""
        state = self.head
        self.remove(state)
        return state

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands. Raises KeyError when it does not wait."""
        priority = state.request.priority
        del self._classes[priority][state.request_id]
        if not self._classes[priority]:
            del self._classes[priority]

    def check(self) -> None:
        """Raise AssertionError unless everything in here waits, in its place."""
        for priority, states in self._classes.items():
            arrivals = [state.arrival for state in states.values()]
            if not arrivals or arrivals != sorted(set(arrivals)):
                raise AssertionError(f"arrivals of priority {priority} are {arrivals}")
            for request_id, state in states.items():
                at_home = (state.request_id, state.request.priority) == (request_id, priority)
                if not at_home or state.status is not Status.WAITING:
                    raise AssertionError(f"{request_id!r} in the queue is {state}")
