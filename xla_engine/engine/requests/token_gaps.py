"""Time between the tokens of rows that decode in every step, counted for all of them together, once a step."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from xla_engine.observability.histogram import Histogram


class Timed(Protocol):
    """A request. last_token_time: of the tokens that it has taken; None without any."""

    @property
    def last_token_time(self) -> float | None: ...


T = TypeVar("T", bound=Timed)


class TokenGaps(Generic[T]):
    """How many rows have a token in each step, from who begins and who ends in which step.

    A row that had a token in the step before has waited as long as the step took. Only one that begins is looked at.
    """

    def __init__(self, histogram: Histogram) -> None:
        """histogram: takes the seconds between tokens."""
        self._histogram = histogram
        self._rows = 0  # with a token in the step that was read last
        self._last = 0.0  # when it was read
        self._begin: dict[int, dict[T, None]] = {}  # by step to come: rows that have their first token in it
        self._ends: dict[int, int] = {}  # by step to come: rows that have no token from it on

    def read(self, step: int, now: float) -> None:
        """Count a step. All steps are read in order while there are rows."""
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
        """A row has tokens from `step` on, a step to come, until before `until`; None for ever."""
        self._begin.setdefault(step, {})[request] = None
        if until is not None:
            self._ends[until] = self._ends.get(until, 0) + 1

    def bound(self, until: int | None, earlier: int) -> None:
        """A row that has joined has no token from `earlier` on, a step to come. until: as it was before."""
        if until is not None:
            self._ends[until] -= 1
        self._ends[earlier] = self._ends.get(earlier, 0) + 1

    def leave(self, request: T, step: int, until: int | None, next_step: int) -> None:
        """A row that has joined has no token from `next_step` on. step, until: as it joined."""
        if until is not None and until < next_step:
            return  # nor would it
        if until is not None:
            self._ends[until] -= 1
        if request in self._begin.get(step, ()):
            del self._begin[step][request]
        else:
            self._rows -= 1

    def clear(self) -> None:
        """There are no rows."""
        self._rows = 0
        self._begin.clear()
        self._ends.clear()
