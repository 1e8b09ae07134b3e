"""A scheduler and the steps in flight; the engine and the simulator share it."""

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Generic, TypeVar

from xla_engine.scheduler.plan import Plan, Speculation
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler

S = TypeVar("S")  # a started step


class StepPipeline(Generic[S]):
    """Plans steps ahead of those that have been read.

    In a turn the caller calls `plan`, starts the step, appends it to `in_flight`, and reads the step of `due`, an
    earlier one.

    scheduler: replaced by `restart`.
    lag: how many started steps may be unread; may be changed between turns. While most rows are constrained, none may
        (`depth`).
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
    def depth(self) -> int:
        """How many started steps may be unread now.

        A constrained row decodes only after its last token was read, so ahead of that it would skip every other step.
        If most rows are constrained, it is faster to read each step before the next one starts.
        """
        return 0 if self.scheduler.most_are_constrained else self.lag

    @property
    def is_full(self) -> bool:
        """Whether a step must be read before the next one starts; true only after `depth` has become smaller."""
        return len(self.in_flight) > self.depth

    def is_due(self, *, started: bool) -> bool:
        """Whether to read a step now. started: this turn has started one; otherwise all steps in flight are read."""
        return len(self.in_flight) > (self.depth if started else 0)

    def due(self, *, started: bool) -> S | None:
        """Remove and return the step to read now; None if there is none."""
        return self.in_flight.popleft() if self.is_due(started=started) else None

    def restart(self, only: Collection[str] | None, live: Collection[str]) -> None:
        """Run every live request again from its beginning; `only` and `live` as in `restarted`."""
        self.in_flight.clear()
        self.scheduler = restarted(self.scheduler, only, live)


def restarted(old: Scheduler, only: Collection[str] | None = None, live: Collection[str] = ()) -> Scheduler:
    """A scheduler with the same live requests and totals, in which every request waits.

    For an engine that has lost the device state, or was interrupted in the middle of a call. Requests keep their
    places in the queue. Their credited tokens count as dropped, because they will be sampled again. A request that had
    a slot before can no longer end by its queue timeout.

    only: ids of the requests that may get a slot until the next restart; None for all.
    live: ids of requests whose end the caller has not delivered. Those that have ended run again, too.
    """
    fresh = Scheduler(old.config, only)
    fresh.submitted, fresh.finished = old.submitted, dict(old.finished)
    fresh.next_step = fresh.committer.steps = old.next_step
    fresh.waiting.turns, fresh.preemption.count = old.waiting.turns, old.preemption.count
    fresh.cached_tokens = old.cached_tokens
    old.settle()
    untold = [old.untold[name] for name in live if name in old.untold and name not in old.states]
    for state in untold:
        state.settle(old.committer.steps)
        fresh.finished[state.finish_reason or FinishReason.ERROR] -= 1
        old.ended.pop(state.request_id, None)
    states = [*old.states.values(), *untold]
    lost = sum(state.credited for state in states)
    fresh.committer.credited = old.committer.credited - lost
    fresh.committer.dropped = old.committer.dropped + lost
    fresh.waiting.max_waiting, fresh.waiting.strict = None, False  # all of them were accepted before
    for state in sorted(states, key=lambda state: state.arrival):
        request = state.request
        if state.status is not Status.WAITING and (
            state.finish_reason is None or state.occupancy is not None
        ):
            request = replace(request, queue_deadline=None)
        fresh.enqueue(RequestState(request=request, arrival=state.arrival, turn=state.turn))
    fresh.waiting.max_waiting, fresh.waiting.strict = old.config.max_waiting, True
    fresh.ended = old.ended
    for ended in old.ended.values():
        ended.occupancy = None
    return fresh
