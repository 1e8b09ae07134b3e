"""Running all live requests again from their beginnings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler


def restarted(old: Scheduler, only: Collection[str] | None = None, live: Collection[str] = ()) -> Scheduler:
    """A scheduler of the same live requests and totals in which nothing has run yet: every request waits.

    For an engine that lost the device's state, or was interrupted in the middle of a call. Requests keep their
    places in line; tokens they were credited count as dropped, since they will be sampled again. A request that
    had a slot before cannot time out in the queue any more.

    only: ids that may get a slot until the next restart, None for all.
    live: ids of requests of which the caller has told no end. Those of them that have ended run again, too.
    """
    fresh = Scheduler(old.config, only)
    fresh._submitted, fresh._finished = old._submitted, dict(old._finished)
    fresh._next_step = fresh._committer.steps = old._next_step
    fresh._waiting.turns, fresh._preemption.count = old._waiting.turns, old._preemption.count
    fresh._cached_tokens = old._cached_tokens
    old._settle()
    untold = [old.untold[name] for name in live if name in old.untold and name not in old._states]
    for state in untold:
        state.settle(old._committer.steps)
        fresh._finished[state.finish_reason or FinishReason.ERROR] -= 1
        old.ended.pop(state.request_id, None)
    states = [*old._states.values(), *untold]
    lost = sum(state.credited for state in states)
    fresh._committer.credited = old._committer.credited - lost
    fresh._committer.dropped = old._committer.dropped + lost
    fresh._waiting.max_waiting, fresh._waiting.strict = None, False  # they were all taken once
    for state in sorted(states, key=lambda state: state.arrival):
        request = state.request
        if state.status is not Status.WAITING and (
            state.finish_reason is None or state.occupancy is not None
        ):
            request = replace(request, queue_deadline=None)
        fresh._queue(RequestState(request=request, arrival=state.arrival, turn=state.turn))
    fresh._waiting.max_waiting, fresh._waiting.strict = old.config.max_waiting, True
    fresh.ended = old.ended
    for ended in old.ended.values():
        ended.occupancy = None
    return fresh
