"""Continuing finished requests: with more tokens, or again under another id.

With `keeps_finished`, `Scheduler.ended` holds the states of finished requests until they are forgotten.
"""

from collections.abc import Sequence

from xla_engine.scheduler.request import FinishReason, Request
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler


def go_on(scheduler: Scheduler, request: Request, tokens: Sequence[int]) -> bool:
    """Queue a request that has already sampled `tokens`, fewer than its `max_tokens`.

    If it reached `max_tokens` under this id and its slot and blocks still hold its KV entries, it continues to decode.
    Otherwise its tokens are prefilled again if that gives the bits of decode, or else sampled again.

    Returns whether all tokens will be sampled again. If this turns out later, a plan names the request in `replays`.
    Raises what `Scheduler.submit` raises.
    """
    name, config = request.request_id, scheduler.config
    if (why := scheduler.never_fits(len(request.prompt_token_ids), request.max_tokens)) is not None:
        raise ValueError(f"request {name!r} can never run: {why}")
    if name in scheduler.states:
        raise ValueError(f"request id {name!r} is in use by a live request; choose another")
    state = RequestState(request=request, arrival=scheduler.submitted, turn=next(scheduler.waiting.turns))
    old = scheduler.ended.get(name)
    if old is not None and old.finish_reason is FinishReason.LENGTH and old.occupancy is not None:
        state.occupancy, state.left, state.goes_on = old.occupancy, old.left, True
        state.prefilled = state.prompt_tokens
    replays = not (state.goes_on or config.keeps_tokens)
    if not replays:
        state.credited = state.planned_before = len(tokens)
        if config.keeps_tokens:
            state.generated = list(tokens)
    scheduler.enqueue(state)
    scheduler.submitted += 1
    scheduler.ended.pop(name, None)
    if old is None and not replays:
        scheduler.committer.credited += len(tokens)
    elif old is not None and replays:
        scheduler.committer.credited -= len(tokens)
        scheduler.committer.dropped += len(tokens)
    return replays


def forget_slots(scheduler: Scheduler) -> None:
    """Note that the device state is lost or about to be: no kept request can continue in its slot."""
    for state in scheduler.ended.values():
        state.occupancy = None
