"""The active rows of a step, of three kinds. Rows of the decode program that no plan names are inactive in its step.

`Decoding`: rows that decode in every step, so the step in which each plans its last token is known.
`Constrained`: each token is planned only after the previous one was read.
`Speculating`: a step may sample several tokens, and how many is known when it is read.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.plan import Row, Speculation, VerifyRow
from xla_engine.scheduler.request import Immutable
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


class Constrained:
    """Running requests whose mask depends on their last token.

    Such a row decodes in a plan only if every token planned for it has been credited. Other rows do not wait for it.

    blocked: ids of requests that get no row in the plan being made.
    """

    def __init__(self) -> None:
        self.blocked: Collection[str] = ()
        self._states: dict[int, RequestState] = {}  # by slot index, in the order of joining

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def num_unblocked(self) -> int:
        """How many requests the latest plan did not hold."""
        if not self.blocked:
            return len(self._states)
        return sum(state.request_id not in self.blocked for state in self)

    def join(self, state: RequestState, *, sampled: int) -> None:
        """Add a request. sampled: how many of its tokens are planned, including the plan being made."""
        state.planned_before = sampled
        self._states[state.slot.index] = state

    def leave(self, state: RequestState) -> None:
        """Remove a request."""
        del self._states[state.slot.index]

    def ready(self) -> list[RequestState]:
        """The requests that have no token in flight, have tokens left, and are not blocked."""
        return [
            state
            for state in self._states.values()
            if state.credited == state.planned_before < state.request.max_tokens
            and state.request_id not in self.blocked
        ]

    def plan(self) -> tuple[Row, ...]:
        """Plan one token for each ready request; returns their rows."""
        ready = self.ready()
        for state in ready:
            state.planned_before += 1
        return tuple(Row(slot=state.slot, request_id=state.request_id) for state in ready)

    def verify(self, widths: dict[int, int]) -> tuple[VerifyRow, ...]:
        """The rows of a verify step. widths: the most tokens of each row, by slot index."""
        ready = self.ready()
        for state in ready:
            state.planned_before += 1
            state.widths[:] = [widths[state.slot.index]]
        return tuple(
            VerifyRow(slot=state.slot, request_id=state.request_id, width=widths[state.slot.index])
            for state in ready
        )

    def done(self) -> tuple[RequestState, ...]:
        """The requests whose last token is planned."""
        return tuple(
            state for state in self._states.values() if state.planned_before == state.request.max_tokens
        )

    def check(self) -> None:
        """Raise AssertionError unless every request is in its slot and has at most one token in flight."""
        for index, state in self._states.items():
            ahead = state.planned_before - state.credited
            if not state.holds_slot or state.slot.index != index or not state.request.constrained:
                raise AssertionError(f"constrained at slot {index}: {state}")
            if ahead not in (0, 1):
                raise AssertionError(f"{ahead} tokens in flight in constrained: {state}")


class Speculating:
    """Running requests with a lower and an upper bound of their tokens.

    Each step in flight gives such a request at least one token and at most its width. A request is wholly planned when
    the lower bound reaches `max_tokens`; blocks are allocated for the upper bound.

    takes_all: requests that begin to decode join here.
    """

    def __init__(self, blocks: BlockManager | None) -> None:
        """blocks: None without a block pool."""
        self._blocks = blocks
        self._states: dict[int, RequestState] = {}  # by slot index, in the order of joining
        self.takes_all = False

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def join(self, state: RequestState, *, sampled: int) -> None:
        """Add a request. sampled: how many of its tokens are planned, including the plan being made."""
        state.last_step = None
        state.planned_before = sampled
        self._states[state.slot.index] = state

    def leave(self, state: RequestState) -> None:
        """Remove a request."""
        del self._states[state.slot.index]

    def exact(self) -> list[RequestState]:
        """The requests whose number of tokens is known: all their steps in flight are verify steps of width 1."""
        return [
            state
            for state in self
            if state.planned_before - state.credited == len(state.widths) == sum(state.widths)
        ]

    def ready(self) -> list[RequestState]:
        """The requests that may need tokens after those in flight."""
        return [state for state in self if state.planned_before < state.request.max_tokens]

    def plan(
        self, speculation: Speculation | None, constrained: Constrained, step: int
    ) -> tuple[VerifyRow, ...]:
        """The rows of `step`; if any may sample several tokens, the rows of `constrained` follow them.

        Each samples one token if there are more rows than lanes, or if no row has room for more.
        """
        if speculation is None and not self._states:
            return ()
        gated, others = constrained.ready(), self.ready()
        if speculation is None or len(gated) + len(others) > speculation.lanes:
            return tuple(self._add(state, 1) for state in others)
        widths = {state.slot.index: self._room(state, speculation.width, step) for state in (*others, *gated)}
        if max(widths.values(), default=1) < 2:
            return tuple(self._add(state, 1) for state in others)
        rows = tuple(self._add(state, widths[state.slot.index]) for state in others)
        return rows + constrained.verify(widths)

    def done(self) -> tuple[RequestState, ...]:
        """The requests whose last token is certain to be planned."""
        states = self._states.values()
        return tuple([state for state in states if state.planned_before >= state.request.max_tokens])

    def check(self) -> None:
        """Raise AssertionError unless every request is in its slot and its bounds are consistent."""
        for index, state in self._states.items():
            if not state.holds_slot or state.slot.index != index or state.request.constrained:
                raise AssertionError(f"speculating at slot {index}: {state}")
            ahead = state.planned_before - state.credited
            if ahead < len(state.widths) or state.last_step is not None or min(state.widths, default=1) < 1:
                raise AssertionError(f"{ahead} tokens in flight at least: {state}")

    def _room(self, state: RequestState, width: int, step: int) -> int:
        """How many tokens up to `width` a row can sample; gives it more blocks if they are free."""
        blocks = self._blocks
        if blocks is None:
            return width
        while blocks.room(state, step) < width and blocks.can_use_more(state) and blocks.grow(state, step):
            pass
        return max(min(width, blocks.room(state, step)), 1)

    @staticmethod
    def _add(state: RequestState, width: int) -> VerifyRow:
        state.planned_before += 1
        state.widths.append(width)
        return VerifyRow(slot=state.slot, request_id=state.request_id, width=width)
