"""What a step moves in the KV memory: parked and resumed states, copied, stored and loaded blocks, reused prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from xla_engine.scheduler.request import Immutable


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Immutable):
    """One stay in a slot: device row `index`, for the `epoch`-th time; from the second on, a recycled one."""

    index: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The first `length` positions of a request's slot are copied from slot `source`, unless that is the same slot.

    place: where the state of recurrent layers after these positions is saved; -1: there are none.
    """

    slot: Slot
    request_id: str
    source: int
    length: int
    place: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of recurrent layers in `slot` is saved at `place` once the chunk that ends after `length` has run."""

    slot: Slot
    length: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Moves the state of a request in `slot`, with `length` written positions, to the host or back.

    blocks: with a block pool, the blocks of these positions, in order; -1 for shared blocks at the beginning, which a
        resume does not write.
    """

    slot: Slot
    request_id: str
    length: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A finished request continues in `slot`, which still holds its state: `length` positions are written, and at most
    `remaining` tokens follow."""

    slot: Slot
    request_id: str
    length: int
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copies block `source` to block `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A full block, or the saved state of recurrent layers after one, whose content is also stored outside of the
    pool, or will be.

    block: its place in the pool, or that of the state; -1 if it has none yet. key: its own. parent: the key of the
    block before it, or the root of the chain. tokens: of the block; a state has none.
    """

    block: int = -1
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]

    @property
    def is_state(self) -> bool:
        return not self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Sets the blocks of an occupancy from its `start`-th block on, in order of position; the others stay."""

    slot: Slot
    request_id: str
    blocks: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What a step moves in the KV memory. Those from `parks` to `reuses` run first in the step, in this order.

    parks: states to move to the host. stores: blocks and saved states whose content to copy out of the pool.
    loads: blocks of the pool and places of states to fill with content from outside. copies: blocks to copy.
    resumes: states to move back from the host. continues: finished requests that go on in their slots.
    reuses: cached prefixes that requests begin with. tables: new entries of block tables.
    saves: states to save while the chunks run, in this order.
    replays: ids of preempted requests that will sample all their tokens again.
    """

    parks: tuple[Swap, ...] = ()
    stores: tuple[StoredBlock, ...] = ()
    loads: tuple[StoredBlock, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    resumes: tuple[Swap, ...] = ()
    continues: tuple[Continuation, ...] = ()
    reuses: tuple[Reuse, ...] = ()
    tables: tuple[BlockTable, ...] = ()
    saves: tuple[SavedState, ...] = ()
    replays: tuple[str, ...] = ()


NO_MOVES = Moves()
