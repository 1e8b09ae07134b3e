"""The rows that decode one token at a time, each after the token before it was read."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from xla_engine.scheduler.plan import Row, VerifyRow
from xla_engine.scheduler.request_state import RequestState


class Constrained:
    """Running requests whose next token depends on what the host makes of the last one.

    Such a row decodes in a plan only when every token planned for it was credited. Other rows do not wait for it.

    held: requests that get no row in the plan that is being made, by id.
    """

    def __init__(self) -> None:
        self.held: Collection[str] = ()
        self._states: dict[int, RequestState] = {}  # by slot index, in the order of joining

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def join(self, state: RequestState, *, sampled: int) -> None:
        """Add a request of which `sampled` tokens are planned, the last one perhaps just now."""
        state.planned_before = sampled
        self._states[state.slot.index] = state

    def leave(self, state: RequestState) -> None:
        """Take a request out, when its last token is planned or before."""
        del self._states[state.slot.index]

    def ready(self) -> list[RequestState]:
        """The requests whose last token was read and is not their last one of all, but for those that are held."""
        return [
            state
            for state in self._states.values()
            if state.credited == state.planned_before < state.request.max_tokens
            and state.request_id not in self.held
        ]

    def plan(self) -> tuple[Row, ...]:
        """The rows that decode in this step; each has one more token planned."""
        ready = self.ready()
        for state in ready:
            state.planned_before += 1
        return tuple(Row(slot=state.slot, request_id=state.request_id) for state in ready)

    def verify(self, widths: dict[int, int]) -> tuple[VerifyRow, ...]:
        """The rows of a verify step, each with as many tokens at most as is said by slot index."""
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
        """Raise AssertionError unless every request here is in its place and at most one token ahead."""
        for index, state in self._states.items():
            ahead = state.planned_before - state.credited
            if not state.holds_slot or state.slot.index != index or not state.request.constrained:
                raise AssertionError(f"constrained at slot {index}: {state}")
            if ahead not in (0, 1):
                raise AssertionError(f"{ahead} tokens in flight in constrained: {state}")
