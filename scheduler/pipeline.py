"""A scheduler and the steps in flight; the engine and the simulator share it."""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from xla_engine.scheduler.plan import Plan, Speculation
from xla_engine.scheduler.restart import restarted
from xla_engine.scheduler.scheduler import Scheduler

S = TypeVar("S")  # a started step


class StepPipeline(Generic[S]):
    """Plans steps ahead of those that have been read.

    In a turn the caller calls `plan`, starts the step, appends it to `in_flight`, and reads the step of `due`, an
    earlier one.

    scheduler: replaced by `restart`.
    lag: how many started steps may be unread; may be changed between turns.
    in_flight: the started steps, oldest first.
    """

    def __init__(self, scheduler: Scheduler, *, lag: int) -> None:
        self.scheduler = scheduler
        self.lag = lag
        self.in_flight: deque[S] = deque()

    def plan(self, speculation: Speculation | None = None, blocked: Collection[str] = ()) -> Plan | None:
        """Plan the next step; None if there is nothing to start. blocked: ids of requests that must skip it."""
        plan = self.scheduler.plan(speculation, blocked)
        return None if plan.is_empty else plan

    @property
    def is_full(self) -> bool:
        """Whether a step must be read before the next one starts; true only after `lag` was lowered."""
        return len(self.in_flight) > self.lag

    def is_due(self, *, started: bool) -> bool:
        """Whether to read a step now. started: this turn has started one; otherwise all steps in flight are read."""
        return len(self.in_flight) > (self.lag if started else 0)

    def due(self, *, started: bool) -> S | None:
        """Remove and return the step to read now; None if there is none."""
        return self.in_flight.popleft() if self.is_due(started=started) else None

    def restart(self, only: Collection[str] | None, live: Collection[str]) -> None:
        """Run every live request again from its beginning; `only` and `live` as in `restarted`."""
        self.in_flight.clear()
        self.scheduler = restarted(self.scheduler, only, live)
