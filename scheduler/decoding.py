"""The rows that decode in every step, and when each plans its last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import itemgetter

from scheduler.plan import NO_CHOICE, Row, Sample, TokenEvent
from scheduler.state import RequestState

_token_id = itemgetter(0)


class Decoding:
    """Membership of the decode step.

    A live row plans one token in every step, so the step of its last token is known when it joins. With a
    calendar of those steps, planning costs what comes and goes, not the size of the batch.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self._keeps_tokens = keeps_tokens
        self._rows: dict[int, Row] = {}  # by slot index, in the order of joining
        self._states: dict[int, RequestState] = {}  # same keys, same order
        self._due: dict[int, dict[int, RequestState]] = {}  # last step -> slot index -> request
        self._uncounted = 0  # tokens that every row has got and `credited` does not say yet
        # Derived from the membership; None until asked for.
        self._row_tuple: tuple[Row, ...] | None = None
        self._ids_and_stops: tuple[tuple[str, ...], frozenset[int]] | None = None
        self._tokens: tuple[list[int], ...] = ()  # of the requests, made with the above

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, first joined first; the same object until membership changes."""
        if self._row_tuple is None:
            self._row_tuple = tuple(self._rows.values())
        return self._row_tuple

    def join(self, state: RequestState, step: int, *, sampled: int) -> None:
        """Take a request that has `sampled` tokens before it decodes, from `step` on and if it may."""
        self.settle()
        index, left = state.slot.index, state.request.max_tokens - sampled
        state.last_step = step + max(left - 1, 0)
        self._due.setdefault(state.last_step, {})[index] = state
        if left:
            self._rows[index] = Row(slot=state.slot, request_id=state.request_id)
            self._states[index] = state
            self._row_tuple = self._ids_and_stops = None

    def leave(self, state: RequestState) -> None:
        """Take a request out, when its last token is planned or before."""
        assert state.last_step is not None, f"{state.request_id!r} never joined"
        self.settle()
        index = state.slot.index
        del self._due[state.last_step][index]
        if not self._due[state.last_step]:
            del self._due[state.last_step]
        if self._rows.pop(index, None) is not None:
            del self._states[index]
            self._row_tuple = self._ids_and_stops = None

    def due(self, step: int) -> tuple[RequestState, ...]:
        """The requests whose last token is planned in `step`."""
        return tuple(self._due.get(step, {}).values())

    def credit_all(
        self, rows: tuple[Row, ...], samples: Sequence[Sequence[Sample]]
    ) -> list[TokenEvent] | None:
        """Credit one more token to everybody, or return None, with nothing done, if the step brought more.

        While membership is what it was when `rows` were planned, every row is its request's still, and none
        reaches its cap with this token. Left to see is that each has one sample, a token, and that none of
        them is a stop token. The loops run inside C calls, which takes two thirds of the time of going row by row.
        """
        if rows is not self._row_tuple or not rows:
            return None
        try:
            flat = [sample for (sample,) in samples]
        except ValueError:
            return None
        if self._ids_and_stops is None:
            stops = {state.request.stop_token_ids for state in self._states.values()}
            self._ids_and_stops = tuple(row.request_id for row in rows), frozenset({NO_CHOICE}).union(*stops)
            self._tokens = tuple(state.generated for state in self._states.values())
        request_ids, ending = self._ids_and_stops
        if not ending.isdisjoint(map(_token_id, flat)):
            return None
        self._uncounted += 1
        if self._keeps_tokens:
            deque(map(list.append, self._tokens, map(_token_id, flat)), maxlen=0)
        # TokenEvent(...) without its Python frame.
        return list(map(tuple.__new__, repeat(TokenEvent), zip(request_ids, flat, repeat(None))))

    def steady_steps(self, next_step: int) -> int:
        """Steps from `next_step` on before the first in which a row plans its last token."""
        return min(self._due) - next_step if self._due else 0

    def credit_steps(self, steps: int) -> int:
        """Credit everybody `steps` tokens; returns how many that are."""
        self._uncounted += steps
        if self._keeps_tokens:
            for state in self._states.values():
                state.generated.extend([0] * steps)
        return steps * len(self._states)

    def settle(self) -> None:
        """Let `credited` of every request say what it has got; for all who are about to read or change it."""
        if self._uncounted:
            for state in self._states.values():
                state.credited += self._uncounted
            self._uncounted = 0

    def check(self, next_step: int) -> None:
        """Raise AssertionError unless rows, requests and calendar agree."""
        dated = {}
        for step, day in self._due.items():
            for index, state in day.items():
                in_place = state.holds_slot and state.slot.index == index
                if not in_place or not state.last_step == step >= next_step:
                    raise AssertionError(f"in the calendar at step {step}, slot {index}: {state}")
                dated[index] = state
        if dated != self._states or list(self._rows) != list(self._states):
            raise AssertionError(f"rows {list(self._rows)} decode, the calendar has {list(dated)}")
        for state, row in zip(self._states.values(), self._rows.values(), strict=True):
            if row != Row(slot=state.slot, request_id=state.request_id):
                raise AssertionError(f"{row} stands for {state}")
        if self._row_tuple not in (None, tuple(self._rows.values())):
            raise AssertionError("the kept tuple of rows is out of date")
