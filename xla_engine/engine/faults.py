"""Failed steps: which requests were in them, which of these makes them fail, and when the device is given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.observability.log import engine_log
from xla_engine.scheduler import Chunk, Plan, Row, VerifyRow

FAULTS_SURVIVED = 1  # failed steps after which a request is run again as before; from then on it is a suspect
FAULTS_IN_A_ROW = 16  # failed steps without a good one between them; then the device is given up
ACQUITTALS = (
    3  # times that a request got past its failed step apart from others; then it is run apart to its end
)


class Faults:
    """Failed steps of one engine, and the search for a request that makes them fail.

    A step that fails once is run again. Requests that were in a second one are suspects: they run apart from all
    others, one half and then the other, and a half that fails is halved again. Only a request that was alone in a
    failed step ends; law 1 gives the others the bits that they have anyway.

    plan: what the device is asked for or about right now. count: failed steps so far. last: the latest, in words.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.last: str | None = None
        self._in_a_row = 0
        self._groups: list[
            list[LiveSequence]
        ] = []  # suspects; the last group runs, the others wait for their turn
        self._reached: dict[LiveSequence, float] = {}  # tokens that a suspect had when its step failed

    def step_was_good(self) -> None:
        """Note that the device has answered."""
        self.plan = None
        if self._in_a_row:
            engine_log.info("recovered: a step was read after %d that failed", self._in_a_row)
            self._in_a_row = 0

    def record(self, cause: str) -> bool:
        """Note a failed step; true if it makes sense to go on."""
        self.last = cause
        self.count += 1
        self._in_a_row += 1
        step = "a turn" if self.plan is None else f"step {self.plan.step}"
        engine_log.warning("%s failed, the %d. in a row: %s", step, self._in_a_row, cause)
        return self._in_a_row < FAULTS_IN_A_ROW

    @property
    def only(self) -> frozenset[str] | None:
        """The requests that may run now; None where all may."""
        return frozenset(one.request_id for one in self._groups[-1]) if self._groups else None

    def blame(self, live: Iterable[LiveSequence], tokens: Callable[[str], int | None]) -> LiveSequence | None:
        """Find the live requests that were in the failed step; returns the one to end, None where there are more.

        tokens: how many a request got since it last began, None where it is not live.
        """
        hit = self._in_step({one.request_id: one for one in live})
        for one in hit:
            one.faults += 1
            self._reached[one] = math.inf if one.acquittals >= ACQUITTALS else tokens(one.request_id) or 0
        suspects = [one for one in hit if one.faults > FAULTS_SURVIVED]
        if self._groups:
            suspects = hit
            if others := [one for one in self._groups.pop() if one not in hit]:
                self._groups.append(others)
        if len(hit) == 1 and suspects and hit[0].faults > FAULTS_SURVIVED:
            return hit[0]
        half = (len(suspects) + 1) // 2
        self._groups += [group for group in (suspects[half:], suspects[:half]) if group]
        return None

    def acquit(self, tokens: Callable[[str], int | None]) -> bool:
        """Whether the requests that run apart are all past the step that failed; then it is the next group's turn."""
        if not self._groups:
            return False
        group = self._groups[-1]
        if any(not one.finished and (tokens(one.request_id) or 0) <= self._reached[one] for one in group):
            return False
        for one in self._groups.pop():
            one.acquittals += 1
        if not self._groups:
            self._reached.clear()
        return True

    def _in_step(self, live: dict[str, LiveSequence]) -> list[LiveSequence]:
        """The live requests of the failed step, prompts first; all that may run where no plan was made."""
        plan, only, self.plan = self.plan, self.only, None
        if plan is None:
            return [one for name, one in live.items() if only is None or name in only]
        parts: tuple[Chunk | Row | VerifyRow, ...] = (*plan.chunks, *plan.decode, *plan.verify)
        return [live[name] for name in dict.fromkeys(part.request_id for part in parts) if name in live]
