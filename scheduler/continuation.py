"""Letting requests go on after their end: with more tokens, or once more under another id.

A scheduler that `keeps_finished` has the states of ended requests in `Scheduler.ended`, until they are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_engine.scheduler.request import FinishReason, Request
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler


def go_on(scheduler: Scheduler, request: Request, tokens: Sequence[int]) -> bool:
    """Queue a request that has sampled `tokens` before, fewer than its `max_tokens`.

    One that reached its cap under this id decodes on where it stands if its slot and blocks still hold what it left.
    Otherwise its tokens are prefilled again where that gives the bits of decode, or else sampled again.

    Returns whether they will all be sampled again from now on; a plan's `replays` tells of those for which this is
    found out later. Raises what `Scheduler.submit` does.
    """
    name, config = request.request_id, scheduler.config
    if (why := scheduler.never_fits(len(request.prompt_token_ids), request.max_tokens)) is not None:
        raise ValueError(f"request {name!r} can never run: {why}")
    if name in scheduler._states:
        raise ValueError(f"request id {name!r} is in use by a live request; choose another")
    state = RequestState(request=request, arrival=scheduler._submitted, turn=next(scheduler._waiting.turns))
    old = scheduler.ended.get(name)
    if old is not None and old.finish_reason is FinishReason.LENGTH and old.occupancy is not None:
        state.occupancy, state.left, state.goes_on = old.occupancy, old.left, True
        state.prefilled = state.prompt_tokens
    replays = not (state.goes_on or config.keeps_tokens)
    if not replays:
        state.credited = state.planned_before = len(tokens)
        if config.keeps_tokens:
            state.generated = list(tokens)
    scheduler._queue(state)
    scheduler._submitted += 1
    scheduler.ended.pop(name, None)
    if old is None and not replays:
        scheduler._committer.credited += len(tokens)
    elif old is not None and replays:
        scheduler._committer.credited -= len(tokens)
        scheduler._committer.dropped += len(tokens)
    return replays


def request_of(scheduler: Scheduler, request_id: str) -> Request | None:
    """A request that is live or has ended and is kept."""
    state = scheduler._states.get(request_id) or scheduler.ended.get(request_id)
    return None if state is None else state.request


def forget(scheduler: Scheduler, request_id: str) -> None:
    """Let go of what is kept of a request that has ended."""
    scheduler.ended.pop(request_id, None)


def forget_slots(scheduler: Scheduler) -> None:
    """The device's state is gone, or will be: no request that has ended goes on in its slot."""
    for state in scheduler.ended.values():
        state.occupancy = None
