"""Running all live requests again from their beginnings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler


def restarted(old: Scheduler, only: Collection[str] | None = None) -> Scheduler:
    """A scheduler of the same live requests and totals in which nothing has run yet: every request waits.

    For an engine that lost the device's state, or was interrupted in the middle of a call. Requests keep their
    places in line; tokens they were credited count as dropped, since they will be sampled again. A request that
    had a slot before cannot time out in the queue any more.

    only: ids that may get a slot until the next restart, None for all.
    """
    fresh = Scheduler(old.config, only)
    fresh._submitted, fresh._finished = old._submitted, dict(old._finished)
    fresh._next_step = fresh._committer.steps = old._next_step
    fresh._waiting.turns, fresh._preemption.count = old._waiting.turns, old._preemption.count
    fresh._cached_tokens = old._cached_tokens
    old._settle()
    lost = sum(state.credited for state in old._states.values())
    fresh._committer.credited = old._committer.credited - lost
    fresh._committer.dropped = old._committer.dropped + lost
    fresh._waiting.max_waiting = None  # they were all taken once
    for state in sorted(old._states.values(), key=lambda state: state.arrival):
        request = state.request
        if state.status is not Status.WAITING:
            request = replace(request, queue_deadline=None)
        fresh._queue(RequestState(request=request, arrival=state.arrival, turn=state.turn))
    fresh._waiting.max_waiting = old.config.max_waiting
    return fresh
