"""The rows that decode in every step, and the step in which each plans its last token."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xla_engine.scheduler.immutable import Immutable
from xla_engine.scheduler.plan import Row
from xla_engine.scheduler.request_state import RequestState

REMEMBERED = 64  # batches remembered; steps of older ones are credited row by row


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Immutable):
    """Rows that decode together, their slots, and functions that append to their requests' tokens."""

    rows: tuple[Row, ...] = ()
    slots: tuple[int, ...] = ()
    keep: tuple[Callable[[int], None], ...] = ()


class Decoding:
    """The rows of the decode step.

    A row plans one token in every step, so the step of its last token is known when it joins. With a calendar of those
    steps, planning costs time only for rows that join or leave.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}  # by slot index, in the order of joining
        self._states: dict[int, RequestState] = {}  # same keys and order
        self._keep: dict[int, Callable[[int], None]] = {}  # same keys and order
        self._due: dict[int, dict[int, RequestState]] = {}  # by last step, then by slot index
        self._batches: deque[Batch] = deque(maxlen=REMEMBERED)
        self._is_new = True  # the rows have changed since the latest batch

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, in the order of joining; the same object until a row joins or leaves."""
        if self._is_new:
            self._batches.append(
                Batch(
                    rows=tuple(self._rows.values()), slots=tuple(self._rows), keep=tuple(self._keep.values())
                )
            )
            self._is_new = False
        return self._batches[-1].rows

    def batch(self, rows: Sequence[Row]) -> Batch | None:
        """The batch with this very tuple of rows, None if it is forgotten; forgets older batches."""
        for batch in self._batches:
            if batch.rows is rows:
                while self._batches[0] is not batch:
                    self._batches.popleft()
                return batch
        return None

    def join(self, state: RequestState, step: int, *, sampled: int) -> None:
        """Add a request that decodes from `step` on. sampled: its tokens by then; if they are all, it gets no row."""
        index, left = state.slot.index, state.request.max_tokens - sampled
        state.last_step = step + max(left - 1, 0)
        state.first_step = step if left else step + 1
        self._due.setdefault(state.last_step, {})[index] = state
        if left:
            self._rows[index] = Row(slot=state.slot, request_id=state.request_id)
            self._states[index] = state
            self._keep[index] = state.generated.append
            self._is_new = True

    def leave(self, state: RequestState) -> None:
        """Remove a request."""
        assert state.last_step is not None, f"{state.request_id!r} never joined"
        index = state.slot.index
        del self._due[state.last_step][index]
        if not self._due[state.last_step]:
            del self._due[state.last_step]
        if self._rows.pop(index, None) is not None:
            del self._states[index], self._keep[index]
            self._is_new = True

    def due(self, step: int) -> tuple[RequestState, ...]:
        """The requests whose last token is planned in `step`."""
        return tuple(self._due.get(step, {}).values())

    def steady_steps(self, next_step: int) -> int:
        """How many steps there are from `next_step` up to the first in which a row plans its last token."""
        return min(self._due) - next_step + 1 if self._due else 0

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
        if not self._is_new and self.rows != tuple(self._rows.values()):
            raise AssertionError("the latest batch is out of date")
