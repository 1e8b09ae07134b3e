"""Round-robin scheduling: when the quantum of each running request ends."""

from collections import deque

from xla_engine.scheduler.request_state import RequestState


class RoundRobin:
    """The running requests, by the step in which their quantum ends; empty if `quantum` is None.

    With R live requests on B slots, a request runs again within ceil(R / B) * (quantum + lag + 1) steps, plus one step
    for each chunk of prompts that start meanwhile.
    """

    def __init__(self, quantum: int | None, slots: int) -> None:
        self._quantum = quantum
        self._slots = slots
        # (the step in which its quantum ends, request); some entries are stale.
        self._running: deque[tuple[int, RequestState]] = deque()

    def __bool__(self) -> bool:
        """Whether any request may have a quantum."""
        return bool(self._running)

    def begin(self, state: RequestState, step: int) -> None:
        """Begin the quantum of a request that runs from `step` on."""
        if self._quantum is None:
            return
        state.turn_ends = step + (state.request.quantum or self._quantum)
        self._running.append((state.turn_ends, state))
        if len(self._running) > 4 * self._slots + 64:
            self._running = deque(entry for entry in self._running if _has_turn(*entry))

    def expired(self, step: int) -> RequestState | None:
        """The request whose quantum ended first, at `step` or before; None if there is none."""
        ends = self.next_end()
        return None if ends is None or ends > step else self._running[0][1]

    def next_end(self) -> int | None:
        """The earliest end of a quantum, perhaps in the past; None if no request runs."""
        while self._running and not _has_turn(*self._running[0]):
            self._running.popleft()
        return self._running[0][0] if self._running else None


def _has_turn(ends: int, state: RequestState) -> bool:
    return state.holds_slot and state.turn_ends == ends
