"""Failed steps: which requests were in them, which of these makes them fail, and when the device is given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.observability.log import engine_log
from xla_engine.scheduler import Chunk, Plan, Row, Swap, VerifyRow

FAULTS_SURVIVED = 1  # failed steps after which a request is run again as before; from then on it is a suspect
FAULTS_IN_A_ROW = (
    16  # failed steps without a good one between them; then the device is given up if the canary fails
)
PASSES = 3  # times that a request got past its failed step apart from others; then it is run apart to its end


class Accused(NamedTuple):
    """A request that was alone in a failed step, and how that failed."""

    sequence: LiveSequence
    cause: str


class Faults:
    """Failed steps of one engine, and the search for the requests that make them fail.

    A step that fails once is run again. Requests that were in a second one are suspects: they run apart from all
    others, one half and then the other, and a half that fails is halved again. A request that was alone in a failed
    step is accused, and the canary runs: a request of the engine's own, with no other on the device. If the device
    answers it, the accused ends; law 1 gives the others the bits that they have anyway. If not, the device is at
    fault.

    Why any number of faulty requests among any number of requests ends these and nothing else:

    - A request ends only if it was alone in a step that failed, and steps without it are good. A good request
      is never alone in a failed step, whatever order they come in, unless the device is at fault.
    - Each failed step halves the group that was in it, so that after 2 + log2(slots) of them at most there is a good
      one, or one request is accused. No number of failed steps is too many as long as the canary lives between them.
    - A faulty request is in every step that it makes fail, so it cannot get past them: it is accused at last.

    Why a device that fails every step does not run on: some request is accused after 2 + log2(slots) steps, the canary
    fails from then on, and at `FAULTS_IN_A_ROW` the engine closes. Turns that fail outside of any step are the host's
    fault, which no canary can tell from a request's: after so many in a row the engine closes, too.

    plan: what the device is asked for or about right now. count: failed steps so far. last: the latest, in words.
    accused: a request that was alone in a failed step, until the canary has lived.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.last: str | None = None
        self.accused: Accused | None = None
        self._in_a_row = 0
        self._outside = 0  # turns in a row that failed outside of any step
        self._groups: list[
            list[LiveSequence]
        ] = []  # suspects; the last group runs, the others wait for their turn
        self._reached: dict[LiveSequence, float] = {}  # tokens that a suspect had when its step failed

    def step_was_good(self) -> None:
        """Note that the device has answered."""
        self.plan = None
        if self._in_a_row:
            engine_log.info("recovered: a step was read after %d that failed", self._in_a_row)
            self._in_a_row = self._outside = 0

    def canary_lived(self) -> Accused | None:
        """Note that the device is well; returns the request to end."""
        accused, self.accused, self.plan = self.accused, None, None
        self._in_a_row = 0
        return accused

    def record(self, cause: str) -> str | None:
        """Note a failed turn; returns why the engine is to be given up, None if it makes sense to go on."""
        self.last = cause
        self.count += 1
        self._in_a_row += 1
        step = "a turn" if self.plan is None else f"step {self.plan.step}"
        if self.accused is not None:
            step = "the canary"
        engine_log.warning("%s failed, the %d. in a row: %s", step, self._in_a_row, cause)
        if self.plan is None:
            self._outside += 1
        if self._outside >= FAULTS_IN_A_ROW:
            return f"{self._outside} turns failed in a row outside of any step, the last with {cause}"
        if self.accused is not None and self._in_a_row >= FAULTS_IN_A_ROW:
            return f"{self._in_a_row} steps failed in a row, the last with no request in it: {cause}"
        return None

    @property
    def only(self) -> frozenset[str] | None:
        """The requests that may run now; None where all may."""
        return frozenset(one.request_id for one in self._groups[-1]) if self._groups else None

    def blame(self, live: Iterable[LiveSequence], tokens: Callable[[str], int | None], cause: str) -> None:
        """Find the live requests that were in the failed step, and accuse one that was alone in it.

        tokens: how many a request got since it last began, None where it is not live.
        """
        if self.accused is not None:
            self.plan = None  # it was the canary's
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
        """Whether the requests that run apart are all past the step that failed; then it is the next group's turn."""
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
        """The live requests of the failed step, prompts first, and whether it had one request, live or not; all that
        may run where no plan was made."""
        plan, only, self.plan = self.plan, self.only, None
        if plan is None:
            names = [name for name in live if only is None or name in only]
        else:
            parts: tuple[Chunk | Row | VerifyRow | Swap, ...]
            parts = (*plan.chunks, *plan.decode, *plan.verify, *plan.parks, *plan.resumes)
            names = list(dict.fromkeys(part.request_id for part in parts))
        return [live[name] for name in names if name in live], len(names) == 1
