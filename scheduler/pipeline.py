"""A scheduler and the steps that were started and not read: what an engine and its simulation have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from xla_engine.scheduler.plan import Plan, Speculation
from xla_engine.scheduler.restart import restarted
from xla_engine.scheduler.scheduler import Scheduler

S = TypeVar("S")  # a started step


class StepPipeline(Generic[S]):
    """Plans steps ahead of those that are read.

    A turn is `plan`, `started`, `due`: it starts a step, if there is one, and reads an earlier one.

    scheduler: replaced by `restart`.
    lag: started steps that may be left unread; may be changed between turns.
    in_flight: these steps, oldest first.
    """

    def __init__(self, scheduler: Scheduler, *, lag: int) -> None:
        self.scheduler = scheduler
        self.lag = lag
        self.in_flight: deque[S] = deque()

    def plan(self, speculation: Speculation | None = None, blocked: Collection[str] = ()) -> Plan | None:
        """The next step; None when there is nothing to start. blocked: requests that sit it out."""
        plan = self.scheduler.plan(speculation, blocked)
        return None if plan.is_empty else plan

    @property
    def is_full(self) -> bool:
        """Whether a step must be read before the next one starts; so after `lag` was lowered."""
        return len(self.in_flight) > self.lag

    def is_due(self, *, started: bool) -> bool:
        """Whether a step is to be read now. started: this turn has started one; else none is left unread."""
        return len(self.in_flight) > (self.lag if started else 0)

    def due(self, *, started: bool) -> S | None:
        """Take out the step to read now, if any."""
        return self.in_flight.popleft() if self.is_due(started=started) else None

    def restart(self, only: Collection[str] | None, live: Collection[str]) -> None:
        """Let every live request run again from its beginning; `only` and `live` as in `restarted`."""
        self.in_flight.clear()
        self.scheduler = restarted(self.scheduler, only, live)
