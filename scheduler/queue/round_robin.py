"""Quantum round-robin: when the turn of each running request ends."""

from __future__ import annotations

from collections import deque

from xla_engine.scheduler.request_state import RequestState


class RoundRobin:
    """Running requests by the step in which their turn of `quantum` steps ends; none where `quantum` is None.

    A request of R that live, on B slots, is served again within ceil(R / B) * (quantum + lag + 1) steps, and one for
    each chunk of the prompts that get their first turn meanwhile.
    """

    def __init__(self, quantum: int | None, slots: int) -> None:
        self._quantum = quantum
        self._slots = slots
        self._running: deque[tuple[int, RequestState]] = (
            deque()
        )  # (when its turn ends, who); stale ones among them

    def __bool__(self) -> bool:
        """Whether any turn may be over or end."""
        return bool(self._running)

    def begin(self, state: RequestState, step: int) -> None:
        """Begin the turn of a request that runs from `step` on."""
        if self._quantum is None:
            return
        state.turn_ends = step + (state.request.quantum or self._quantum)
        self._running.append((state.turn_ends, state))
        if len(self._running) > 4 * self._slots + 64:
            self._running = deque(entry for entry in self._running if _has_turn(*entry))

    def expired(self, step: int) -> RequestState | None:
        """The request whose turn was over the longest ago in `step`; None where no turn is."""
        ends = self.next_end()
        return None if ends is None or ends > step else self._running[0][1]

    def next_end(self) -> int | None:
        """The step in which the first turn ends, or did; None when no request runs."""
        while self._running and not _has_turn(*self._running[0]):
            self._running.popleft()
        return self._running[0][0] if self._running else None


def _has_turn(ends: int, state: RequestState) -> bool:
    return state.holds_slot and state.turn_ends == ends
