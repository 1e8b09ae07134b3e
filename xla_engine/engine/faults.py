"""Failed steps: which requests were in them, which request makes them fail, and when the engine closes."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.observability.log import engine_log
from xla_engine.scheduler import Chunk, Plan, Row, Swap, VerifyRow

FAULTS_SURVIVED = 1  # failed steps that do not make a request a suspect
FAULTS_IN_A_ROW = 16  # consecutive failed steps after which the engine closes if the canary fails, too
PASSES = 3  # times that a suspect may get past its failed step; if it fails again, it runs apart to its end


class Accused(NamedTuple):
    """A request that was alone in a failed step, and the step's error."""

    sequence: LiveSequence
    cause: str


class Faults:
    """Counts the failed steps of an engine, and searches for the requests that make steps fail.

    After a first failed step, all its requests run again. Requests that were in a second one are suspects. They run
    apart from all others, one half after the other, and a half that fails is halved again. A request that was alone in
    a failed step is accused. Then the canary, a request of the engine's own, runs alone on the device. If it succeeds,
    the accused request ends with an error, and the others run again with the same bits (law 1). If it fails, the
    device is at fault.

    Why this ends all faulty requests and no others, however many there are:

    - A request ends only if it was alone in a failed step and the canary then succeeded. Unless the device is at
      fault, a good request is never alone in a failed step, whatever the order.
    - Each failed step halves the group that was in it. After at most 2 + log2(slots) failed steps, either a step
      succeeds or one request is accused. The engine does not close as long as the canary succeeds in between.
    - A faulty request is in every step that it makes fail and cannot get past them, so in the end it is accused.

    Why the engine closes if the device fails every step: after 2 + log2(slots) steps some request is accused, the
    canary fails from then on, and after `FAULTS_IN_A_ROW` failed steps the engine closes. If turns fail outside of any
    step, the host is at fault, which the canary cannot find out: the engine closes after `FAULTS_IN_A_ROW` of them.

    plan: the plan that is being started or read. count: failed turns so far. last: the latest error.
    accused: a request that was alone in a failed step, until the canary has succeeded.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.last: str | None = None
        self.accused: Accused | None = None
        self._in_a_row = 0
        self._outside = 0  # turns in a row that failed outside of any step
        # Suspects. The last group runs; the others wait.
        self._groups: list[list[LiveSequence]] = []
        # By suspect: its tokens when its step failed. It has passed that step once it has more.
        self._reached: dict[LiveSequence, float] = {}

    def step_was_good(self) -> None:
        self.plan = None
        if self._in_a_row:
            engine_log.info("recovered: a step succeeded after %d failed steps", self._in_a_row)
            self._in_a_row = self._outside = 0

    def canary_lived(self) -> Accused | None:
        """Note that the canary succeeded; returns the accused request, which must end."""
        accused, self.accused, self.plan = self.accused, None, None
        self._in_a_row = 0
        return accused

    def record(self, cause: str) -> str | None:
        """Note a failed turn; returns why the engine must close, None if it can continue."""
        self.last = cause
        self.count += 1
        self._in_a_row += 1
        step = "a turn" if self.plan is None else f"step {self.plan.step}"
        if self.accused is not None:
            step = "the canary"
        engine_log.warning("%s failed (%d in a row): %s", step, self._in_a_row, cause)
        if self.plan is None:
            self._outside += 1
        if self._outside >= FAULTS_IN_A_ROW:
            return f"{self._outside} turns failed in a row outside of a step, the last with {cause}"
        if self.accused is not None and self._in_a_row >= FAULTS_IN_A_ROW:
            return f"{self._in_a_row} steps failed in a row, the last one without any request: {cause}"
        return None

    @property
    def only(self) -> frozenset[str] | None:
        """The requests that may run now; None if all may."""
        return frozenset(one.request_id for one in self._groups[-1]) if self._groups else None

    def blame(self, live: Iterable[LiveSequence], tokens: Callable[[str], int | None], cause: str) -> None:
        """Make the live requests of the failed step suspects, or accuse a request that was alone in it.

        tokens: returns how many tokens a request got since it last started; None if it is not live.
        """
        if self.accused is not None:
            self.plan = None  # it was the canary's plan
            return
        hit, alone = self._in_step({one.request_id: one for one in live})
        for one in hit:
            one.faults += 1
            self._reached[one] = math.inf if one.passes >= PASSES else tokens(one.request_id) or 0
        suspects = [one for one in hit if one.faults > FAULTS_SURVIVED]
        if self._groups:
            suspects = hit
            if others := [one for one in self._groups.pop() if one not in hit]:
                self._groups.append(others)
        if alone and suspects and hit[0].faults > FAULTS_SURVIVED:
            self.accused = Accused(hit[0], cause)
            return
        half = (len(suspects) + 1) // 2
        self._groups += [group for group in (suspects[half:], suspects[:half]) if group]

    def passed(self, tokens: Callable[[str], int | None]) -> bool:
        """Whether all requests that run apart have passed the step that failed; if so, the next group may run."""
        if not self._groups or self.accused is not None:
            return False
        group = self._groups[-1]
        if any(not one.finished and (tokens(one.request_id) or 0) <= self._reached[one] for one in group):
            return False
        for one in self._groups.pop():
            one.passes += 1
        if not self._groups:
            self._reached.clear()
        return True

    def _in_step(self, live: dict[str, LiveSequence]) -> tuple[list[LiveSequence], bool]:
        """The live requests of the failed step, prompts first, and whether it had only one request, live or not.

        If no plan was made: all requests that may run.
        """
        plan, only, self.plan = self.plan, self.only, None
        if plan is None:
            names = [name for name in live if only is None or name in only]
        else:
            parts: tuple[Chunk | Row | VerifyRow | Swap, ...]
            parts = (*plan.chunks, *plan.decode, *plan.verify, *plan.parks, *plan.resumes)
            names = list(dict.fromkeys(part.request_id for part in parts))
        return [live[name] for name in names if name in live], len(names) == 1
