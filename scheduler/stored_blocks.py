"""Blocks of prompts that are stored outside the device: which of them the pool lacks, and loading these.

Models with recurrent layers also store saved states, and can use blocks only up to one of them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from xla_engine.scheduler.moves import StoredBlock
from xla_engine.scheduler.request import Request
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler


def full_blocks(scheduler: Scheduler, request: Request) -> Iterable[StoredBlock]:
    """The full blocks of a prompt, in order, by the keys of the block pool; none without a pool."""
    return () if scheduler.kv.blocks is None else scheduler.kv.blocks.full_blocks(request)


def loadable(scheduler: Scheduler, request: Request, found: Callable[[Sequence[bytes]], int]) -> int:
    """How many full blocks of a prompt, from the first on, are in the pool or outside, up to a state if the model has
    recurrent layers. found: how many of these keys, from the first on, are outside."""
    kv, blocks = scheduler.kv, list(full_blocks(scheduler, request))
    if kv.blocks is None:
        return 0
    pool = kv.blocks.pool
    lacking = [at for at, block in enumerate(blocks) if pool.find(block.key) is None]
    unpooled = found([blocks[at].key for at in lacking]) if lacking else 0
    count = lacking[unpooled] if unpooled < len(lacking) else len(blocks)
    if kv.states is None:
        return count
    most = request.max_cached_tokens
    end = min(len(request.prompt_token_ids) - 1, *(() if most is None else (most,)), count * pool.block_size)
    return kv.states.last(blocks[:count], end, lambda state: found([state.key]) == 1)


def gained_tokens(scheduler: Scheduler, request: Request) -> int:
    """How many tokens of a prompt need not be computed once its `stored_blocks` are loaded, besides those that need
    not now."""
    kv = scheduler.kv
    if kv.blocks is None:
        return 0
    cached = kv.cached_tokens(RequestState(request=request, arrival=0, turn=0))
    return max(request.stored_blocks * kv.blocks.pool.block_size - cached, 0)


def missing_blocks(scheduler: Scheduler, request: Request) -> list[StoredBlock]:
    """Those of a request's `stored_blocks` that the pool lacks, from the first such on, after the state that follows
    them if it is not saved."""
    blocks = scheduler.kv.blocks
    return [] if blocks is None else blocks.missing_blocks(request, request.stored_blocks)


def waiting(scheduler: Scheduler) -> Request | None:
    """The request that is next in line and waits for stored blocks; None if there is none."""
    name = scheduler.awaits_blocks
    state = None if name is None else scheduler.states.get(name)
    return None if state is None else state.request


def load(scheduler: Scheduler, request_id: str, keys: Collection[bytes]) -> tuple[StoredBlock, ...]:
    """Let the next plan load those of a request's `stored_blocks` that the pool lacks, up to the first that is not in
    `keys`, and the state after them; the request waits for no others. Returns those that will be loaded: none if no
    live request has this id, and fewer if not enough blocks are free."""
    state, blocks = scheduler.states.get(request_id), scheduler.kv.blocks
    if state is None or blocks is None:
        return ()
    state.awaits_blocks = False
    return blocks.load(state.request, keys)
