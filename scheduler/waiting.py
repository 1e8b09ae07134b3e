"""The queue of requests that have no slot yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from scheduler.request import Status
from scheduler.state import RequestState


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not taken and nothing changed."""

    code = "queue_full"


class WaitingQueue:
    """Arrival order, with push, pop and removal by id in constant time.

    max_waiting: most requests to hold, None for no bound.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self.max_waiting = max_waiting
        # An OrderedDict, because finding the first key of a dict scans all that were deleted before it.
        self._states: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def head(self) -> RequestState:
        """The request that arrived first. Raises StopIteration when empty."""
        return next(iter(self))

    def push(self, state: RequestState) -> None:
        """Put a request at the back. Raises QueueFullError."""
        if self.max_waiting is not None and len(self) >= self.max_waiting:
            raise QueueFullError(
                f"request {state.request_id!r} was not taken: {len(self)} wait and max_waiting is "
                f"{self.max_waiting}; submit it again after a step, abort one that waits, or raise the bound"
            )
        assert state.request_id not in self._states, f"request {state.request_id!r} waits already"
        self._states[state.request_id] = state

    def pop(self) -> RequestState:
        """Take the request that arrived first. Raises KeyError when empty."""
        return self._states.popitem(last=False)[1]

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands. Raises KeyError when it does not wait."""
        del self._states[state.request_id]

    def check(self) -> None:
        """Raise AssertionError unless everything in here waits and the bound holds."""
        for request_id, state in self._states.items():
            if state.request_id != request_id or state.status is not Status.WAITING:
                raise AssertionError(f"{request_id!r} in the queue is {state}")
        if self.max_waiting is not None and len(self) > self.max_waiting:
            raise AssertionError(f"{len(self)} requests wait, more than max_waiting {self.max_waiting}")
