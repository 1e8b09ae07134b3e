"""Counting failed steps: which requests were in them, which may run again, and when the device is given up."""

from __future__ import annotations

from collections.abc import Iterable

from xla_engine.engine.sequence import LiveSequence
from xla_engine.scheduler import Chunk, Plan, Row

FAULTS_SURVIVED = 1  # failed steps after which a request is run again; one more ends it
FAULTS_IN_A_ROW = 4  # failed steps without a good one between them; then the device is given up


class Faults:
    """Failed steps of one engine.

    plan: what the device is asked for or about right now. count: failed steps so far. last: the latest, in words.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.last: str | None = None
        self._in_a_row = 0

    def step_was_good(self) -> None:
        """Note that the device has answered."""
        self.plan, self._in_a_row = None, 0

    def record(self, cause: str) -> bool:
        """Note a failed step; true if it makes sense to go on."""
        self.last = cause
        self.count += 1
        self._in_a_row += 1
        return self._in_a_row < FAULTS_IN_A_ROW

    def exhausted(self, live: Iterable[LiveSequence]) -> list[LiveSequence]:
        """Return the live requests that were in the failed step, and have been in more failed ones than they may."""
        concerned = None
        if self.plan is not None:
            parts: tuple[Chunk | Row, ...] = (*self.plan.chunks, *self.plan.decode)
            concerned = {part.request_id for part in parts}
        self.plan = None
        hit = [request for request in live if concerned is None or request.request_id in concerned]
        for request in hit:
            request.faults += 1
        return [request for request in hit if request.faults > FAULTS_SURVIVED]
