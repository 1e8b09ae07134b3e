"""The rows that decode in every step, and when each plans its last token."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple

from scheduler.plan import NO_CHOICE, Row, Sample, TokenEvent
from scheduler.request import FinishReason
from scheduler.state import RequestState

_token_id = itemgetter(0)
_request_id = attrgetter("request_id")
_generated = attrgetter("generated")


class Credits(NamedTuple):
    """What a step brought its rows: events in their order, who ends by them and why, and samples that are nobody's."""

    events: list[TokenEvent]
    ended: list[tuple[RequestState, FinishReason]]
    dropped: int


class Decoding:
    """Membership of the decode step.

    A live row plans one token in every step, so the step of its last token is known when it joins. With a
    calendar of those steps, planning and crediting cost what comes and goes; what they do for every row of the batch
    runs inside C calls.

    live: every live request by id, as it stands.
    """

    def __init__(self, live: Mapping[str, RequestState], *, keeps_tokens: bool = False) -> None:
        self._live = live
        self._keeps_tokens = keeps_tokens
        self._rows: dict[int, Row] = {}  # by slot index, in the order of joining
        self._states: dict[int, RequestState] = {}  # same keys, same order
        self._due: dict[int, dict[int, RequestState]] = {}  # last step -> slot index -> request
        # Tokens that end a row, each with how many rows, until all is read.
        self._stops = Counter({NO_CHOICE: 1})
        self._row_tuple: tuple[Row, ...] | None = None  # None until asked for
        # Rows that were credited last, and their ids.
        self._names: tuple[tuple[Row, ...], tuple[str, ...]] = ((), ())
        # Of steps that were planned and are not credited yet:
        self._ending: dict[int, list[RequestState]] = {}  # step -> who has its last token in it
        self._gone: list[tuple[str, int, int]] = []  # rows that are over: id, first and last step
        self._unlike = 0  # steps before this one have rows that are not as others

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
        index, left = state.slot.index, state.request.max_tokens - sampled
        state.last_step = step + max(left - 1, 0)
        state.first_step = step if left else step + 1
        self._due.setdefault(state.last_step, {})[index] = state
        if left:
            self._rows[index] = Row(slot=state.slot, request_id=state.request_id)
            self._states[index] = state
            self._row_tuple = None
            self._stops.update(state.request.stop_token_ids)

    def leave(self, state: RequestState) -> None:
        """Take a request out, when its last token is planned or before."""
        assert state.last_step is not None, f"{state.request_id!r} never joined"
        index = state.slot.index
        del self._due[state.last_step][index]
        if not self._due[state.last_step]:
            del self._due[state.last_step]
        if self._rows.pop(index, None) is not None:
            del self._states[index]
            self._row_tuple = None

    def due(self, step: int) -> tuple[RequestState, ...]:
        """The requests whose last token is planned in `step`."""
        return tuple(self._due.get(step, {}).values())

    def hand_over(self, state: RequestState) -> None:
        """`leave`, as the last token is planned; it is credited with the step's others."""
        self.leave(state)
        assert state.last_step is not None
        if state.first_step <= state.last_step:
            self._ending.setdefault(state.last_step, []).append(state)

    def taken_away(self, state: RequestState, next_step: int) -> None:
        """A request that joined was preempted: steps before `next_step` are credited row by row."""
        self._forget(state)
        self.differ(next_step)

    def over(self, state: RequestState, committed: int, next_step: int) -> None:
        """A request that joined has ended: what steps from `committed` on have sampled for it is nobody's."""
        assert state.last_step is not None
        self._forget(state)
        first, last = max(state.first_step, committed), min(state.last_step, next_step - 1)
        if first <= last:
            self._gone.append((state.request_id, first, last))

    def differ(self, next_step: int) -> None:
        """Steps before `next_step` are credited row by row: they have rows that are not as the others."""
        self._unlike = next_step

    def _forget(self, state: RequestState) -> None:
        if state.first_step <= (state.last_step or 0):
            self._stops.subtract(state.request.stop_token_ids)
            for token_id in state.request.stop_token_ids:
                if not self._stops[token_id]:
                    del self._stops[token_id]

    def credit_all(
        self, step: int, rows: tuple[Row, ...], samples: Sequence[Sequence[Sample]]
    ) -> Credits | None:
        """Credit the step's token to everybody, or return None, with nobody credited, where it has to be row by row.

        Every row is its request's still, but for those known to be over, and reaches its cap in the step that was
        foreseen. Left to see is that each has one sample, and which of them may be stop tokens.
        """
        ending, gone = self._ending.pop(step, ()), self._gone
        if gone:
            self._gone = [row for row in gone if row[2] > step]
        if step < self._unlike:
            return None
        if rows is not self._names[0]:
            self._names = rows, tuple(map(_request_id, rows))
        names, samples, dropped = list(self._names[1]), list(samples), 0
        for name, first, last in gone:
            if first <= step <= last:
                at = names.index(name)
                del names[at]
                dropped += len(samples.pop(at))
        try:
            flat = [sample for (sample,) in samples]
        except ValueError:
            return None
        if self._keeps_tokens:
            lists = map(_generated, map(self._live.__getitem__, names))
            deque(map(list.append, lists, map(_token_id, flat)), maxlen=0)
        # TokenEvent(...) without its Python frame.
        events = list(map(tuple.__new__, repeat(TokenEvent), zip(names, flat, repeat(None))))
        last_ones = {names.index(s.request_id) for s in ending if self._live.get(s.request_id) is s}
        if not self._stops.keys().isdisjoint(map(_token_id, flat)):
            last_ones.update(at for at, (token_id, *_) in enumerate(flat) if token_id in self._stops)
        ended = []
        for at in sorted(last_ones):
            state = self._live[names[at]]
            if (reason := _end(state, flat[at].token_id, step)) is not None:
                events[at] = TokenEvent(names[at], flat[at], reason)
                ended.append((state, reason))
        return Credits(events, ended, dropped)

    def steady_steps(self, next_step: int) -> int:
        """Steps from `next_step` on before the first in which a row plans its last token."""
        return min(self._due) - next_step if self._due else 0

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


def _end(state: RequestState, token_id: int, step: int) -> FinishReason | None:
    """Why a row ends with this token, if it does."""
    if token_id == NO_CHOICE:
        return FinishReason.ERROR
    if token_id in state.request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if state.last_step == step else None
