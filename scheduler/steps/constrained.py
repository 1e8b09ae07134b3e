"""Constrained rows: each token is planned only after the previous one was read."""

from collections.abc import Collection, Iterator

from xla_engine.scheduler.plan import Row, VerifyRow
from xla_engine.scheduler.request_state import RequestState


class Constrained:
    """Running requests whose mask depends on their last token.

    Such a row decodes in a plan only if every token planned for it has been credited. Other rows do not wait for it.

    held: ids of requests that get no row in the plan being made.
    """

    def __init__(self) -> None:
        self.held: Collection[str] = ()
        self._states: dict[int, RequestState] = {}  # by slot index, in the order of joining

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def join(self, state: RequestState, *, sampled: int) -> None:
        """Add a request. sampled: how many of its tokens are planned, including the plan being made."""
        state.planned_before = sampled
        self._states[state.slot.index] = state

    def leave(self, state: RequestState) -> None:
        """Remove a request."""
        del self._states[state.slot.index]

    def ready(self) -> list[RequestState]:
        """The requests that have no token in flight, have tokens left, and are not held."""
        return [
            state
            for state in self._states.values()
            if state.credited == state.planned_before < state.request.max_tokens
            and state.request_id not in self.held
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
