"""Measure the host's time in each phase of a turn: plan, dispatch, wait, commit, deliver."""

import time
from collections.abc import Callable
from dataclasses import dataclass

PHASES = ("plan", "dispatch", "wait", "commit", "deliver")
_PLAN, _DISPATCH, _WAIT, _COMMIT, _DELIVER, _BETWEEN = range(6)
_MOST = 64  # limit on remembered unread steps, because a failed step is never read


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Nanoseconds of wall time by phase.

    The five phases of a turn sum to its wall time. With `between` they sum to all time in which there were requests.

    turns: number of finished turns.
    plan: ending expired requests, planning the next step, and recording what was started.
    dispatch: starting the step on the device.
    wait: for the device, and for the lock if threads share an engine.
    commit: crediting the tokens of a step that was read.
    deliver: giving requests their tokens and text, or rerunning them after a failed step.
    between: between turns while there are requests: the caller's time, and taking the lock.
    """

    turns: int = 0
    plan: int = 0
    dispatch: int = 0
    wait: int = 0
    commit: int = 0
    deliver: int = 0
    between: int = 0

    @property
    def wall(self) -> int:
        """Wall time of all turns."""
        return sum(getattr(self, name) for name in PHASES)


class PhaseTimer:
    """Reads the clock at each change of phase, which the loop announces by a call.

    on_step: called with the number of each step that was read and the nanoseconds of its phases in the order of
    `PHASES`: its own planning and dispatch, and the rest of the turn that read it. If a turn starts no step, its
    planning counts for the step that it reads.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """clock: nanoseconds."""
        self.on_step: Callable[[int, tuple[int, ...]], None] | None = None
        self._clock = clock
        self._last: int | None = None  # end of the latest phase; None while idle
        self._turns = 0
        self._all = [0] * 6  # by phase, and between turns
        self._turn = [0] * 6  # the same, not yet reported for a step
        self._started: dict[int, tuple[int, int]] = {}  # by step: planning and dispatch, until it is read
        self._starting: int | None = None  # the step that this turn starts
        self._read: int | None = None  # the step that this turn reads

    @property
    def times(self) -> PhaseTimes:
        """The totals so far."""
        by_name = dict(zip((*PHASES, "between"), self._all, strict=True))
        return PhaseTimes(turns=self._turns, **by_name)

    def begin(self) -> None:
        """Call at the beginning of a turn."""
        self._mark(_BETWEEN)

    def dispatches(self) -> None:
        """Call when a step was planned, before it is started."""
        self._mark(_PLAN)

    def dispatched(self, step: int) -> None:
        """Call when the device has accepted the step."""
        self._mark(_DISPATCH)
        self._starting = step

    def planned(self, *, is_over: bool, has_work: bool) -> None:
        """Call after the first half of a turn. is_over: there is no second half."""
        self._mark(_PLAN)
        if self._starting is not None:
            turn = self._turn
            self._started[self._starting] = turn[_PLAN], turn[_DISPATCH]
            turn[_PLAN] = turn[_DISPATCH] = 0
            self._starting = None
        if is_over:
            self._end_of_turn(has_work=has_work)

    def answered(self) -> None:
        """Call when the device has answered and the lock was taken."""
        self._mark(_WAIT)

    def committed(self, step: int) -> None:
        """Call when the tokens of a step were credited."""
        self._mark(_COMMIT)
        self._read = step

    def ended(self, *, has_work: bool) -> None:
        """Call when requests got their tokens, or rerun after a failed step."""
        self._mark(_DELIVER)
        self._end_of_turn(has_work=has_work)

    def _mark(self, phase: int) -> None:
        """Add the time since the last mark to a phase."""
        now = self._clock()
        if self._last is not None:
            spent = now - self._last
            self._all[phase] += spent
            self._turn[phase] += spent
        self._last = now

    def _end_of_turn(self, *, has_work: bool) -> None:
        self._turns += 1
        if (step := self._read) is not None:
            self._read = None
            plan, dispatch = self._started.pop(step, (0, 0))
            if len(self._started) > _MOST:
                self._started.clear()
            more, _, wait, commit, deliver, _ = self._turn
            self._turn = [0] * 6
            if self.on_step is not None:
                self.on_step(step, (plan + more, dispatch, wait, commit, deliver))
        if not has_work:
            self._last = None
