"""Blocks of prompts that are stored outside the device: which of them the pool lacks, and loading these."""

from collections.abc import Collection, Iterable

from xla_engine.scheduler.moves import StoredBlock
from xla_engine.scheduler.request import Request
from xla_engine.scheduler.scheduler import Scheduler


def full_blocks(scheduler: Scheduler, request: Request) -> Iterable[StoredBlock]:
    """The full blocks of a prompt, in order, by the keys of the block pool; none without a pool."""
    return () if scheduler.kv.blocks is None else scheduler.kv.blocks.full_blocks(request)


def has_block(scheduler: Scheduler, key: bytes) -> bool:
    """Whether the block pool has the block with this key."""
    return scheduler.kv.blocks is not None and scheduler.kv.blocks.pool.find(key) is not None


def missing_blocks(scheduler: Scheduler, request_id: str) -> list[StoredBlock]:
    """Those of a waiting request's `stored_blocks` that the pool lacks, from the first such on; none if it has
    ended."""
    state, blocks = scheduler.states.get(request_id), scheduler.kv.blocks
    if state is None or blocks is None:
        return []
    return blocks.missing_blocks(state.request, state.request.stored_blocks)


def load(scheduler: Scheduler, request_id: str, keys: Collection[bytes]) -> tuple[StoredBlock, ...]:
    """Let the next plan load those of a request's `stored_blocks` that the pool lacks, up to the first that is not in
    `keys`; the request waits for no others. Returns those that will be loaded: none if no live request has this id,
    and fewer if not enough blocks are free."""
    state, blocks = scheduler.states.get(request_id), scheduler.kv.blocks
    if state is None or blocks is None:
        return ()
    state.awaits_blocks = False
    return blocks.load(state.request, keys)
