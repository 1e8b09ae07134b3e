"""Whether the next in line could use a slot, if there were one."""

from collections.abc import Collection

from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState

# Why a request waits, or is blocked.
IN_FLIGHT = "tokens of it are in flight"
ENCODING = "its pictures are being encoded"
MASK = "its mask is being computed"
LOADING = "its cached prefix is being loaded"


def unready(
    state: RequestState, kv: KVAllocator, masked: Collection[str], *, uses: bool = False
) -> str | None:
    """What a waiting request lacks besides a slot; None if nothing.

    masked: ids of requests whose mask is not ready. uses: the look at the features of its pictures counts as a use.

    A prompt whose keys and values are cached needs features, too: the cache may have lost them when it is prefilled.
    """
    request, features, blocks = state.request, kv.features, kv.blocks
    if state.credited < state.planned_before:
        return IN_FLIGHT
    if state.request_id in masked and state.awaits_mask:
        return MASK
    if state.awaits_blocks and blocks is not None and blocks.missing_blocks(request, request.stored_blocks):
        return LOADING
    if features is None or not request.images or state.goes_on or state.status is not Status.WAITING:
        return None
    if uses:
        features.use(request)
    return None if features.has_all(request) else ENCODING
