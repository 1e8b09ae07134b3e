"""The deadlines of requests."""

import heapq
import math
from collections.abc import Iterator

from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState


class Deadlines:
    """A heap of deadlines, earliest first; those of finished requests are removed lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FinishReason, RequestState]] = []

    def add(self, state: RequestState) -> None:
        """Add a request's deadlines, if it has any."""
        for time, reason in (
            (state.request.deadline, FinishReason.DEADLINE),
            (state.request.queue_deadline, FinishReason.QUEUE_TIMEOUT),
        ):
            if time is not None:
                heapq.heappush(self._heap, (time, state.arrival, reason, state))

    @property
    def next_time(self) -> float:
        """The earliest deadline, perhaps of a finished request; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[tuple[RequestState, FinishReason]]:
        """Remove and yield the requests due at `now`, earliest first. The caller ends each before the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, reason, state = heapq.heappop(self._heap)
            if _counts(state, reason):
                yield state, reason

    def forget_ended(self, live: int) -> None:
        """Remove the deadlines of finished requests if they are many: memory stays proportional to `live`."""
        if len(self._heap) > 4 * live + 64:
            self._heap = [entry for entry in self._heap if _counts(entry[3], entry[2])]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def _counts(state: RequestState, reason: FinishReason) -> bool:
    if reason is FinishReason.QUEUE_TIMEOUT:
        return state.status is Status.WAITING and state.request.queue_deadline is not None
    return state.status is not Status.FINISHED
