"""Inter-token times of buffered rows, which decode in every step: added for all of them at once, once a step."""

from typing import Generic, Protocol, TypeVar

from xla_engine.observability.histogram import Histogram


class Timed(Protocol):
    """A request. last_token_time: that of the latest token it has taken; None without any."""

    @property
    def last_token_time(self) -> float | None: ...


T = TypeVar("T", bound=Timed)


class TokenGaps(Generic[T]):
    """Counts how many rows have a token in each step, from the steps in which rows begin and end.

    The inter-token time of a row is the time since the previous step if it had a token in that, too. Only rows that
    begin are looked at one by one.
    """

    def __init__(self, histogram: Histogram) -> None:
        """histogram: of the seconds between tokens."""
        self._histogram = histogram
        self._rows = 0  # rows with a token in the latest step
        self._last = 0.0  # when that step was read
        self._begin: dict[int, dict[T, None]] = {}  # by future step: rows whose first token is in it
        self._ends: dict[int, int] = {}  # by future step: how many rows have no token from it on

    def read(self, step: int, now: float) -> None:
        """Add a step that was read; while there are rows, every step must come, in order."""
        self._rows -= self._ends.pop(step, 0)
        if self._rows:
            self._histogram.add(now - self._last, self._rows)
        if (new := self._begin.pop(step, None)) is not None:
            self._rows += len(new)
            for request in new:
                if (before := request.last_token_time) is not None:
                    self._histogram.add(now - before)
        self._last = now

    def join(self, request: T, step: int, until: int | None) -> None:
        """Note that a row has tokens from the future `step` on, to before `until`; None: without end."""
        self._begin.setdefault(step, {})[request] = None
        if until is not None:
            self._ends[until] = self._ends.get(until, 0) + 1

    def bound(self, until: int | None, earlier: int) -> None:
        """Note that a row ends sooner, before the future step `earlier`. until: its end so far."""
        if until is not None:
            self._ends[until] -= 1
        self._ends[earlier] = self._ends.get(earlier, 0) + 1

    def leave(self, request: T, step: int, until: int | None, next_step: int) -> None:
        """Note that a row has no token from `next_step` on. step, until: as in `join`."""
        if until is not None and until < next_step:
            return  # it has ended already
        if until is not None:
            self._ends[until] -= 1
        if request in self._begin.get(step, ()):
            del self._begin[step][request]
        else:
            self._rows -= 1

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = 0
        self._begin.clear()
        self._ends.clear()
