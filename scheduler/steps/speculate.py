"""Speculating rows: they may sample several tokens in a step, and how many is known when the step is read."""

from collections.abc import Iterator

from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.plan import Speculation, VerifyRow
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps.constrained import Constrained


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
