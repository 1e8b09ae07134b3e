"""Device state of the rows: everything a decode step needs to know about a request, one entry per slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.row_state.lanes import targets
from xla_engine.graphs.row_state.limits import MAX_LOGIT_BIAS
from xla_engine.graphs.row_state.packing import pack, unpack
from xla_engine.graphs.row_state.sampling_fields import SamplingRows, make_sampling_rows

T = TypeVar("T", "Rows", "RowState")

NOT_KEPT = -3  # in place of a token that was sampled behind a wrong draft
NO_CHOICE = -2  # in place of a sampled token: the row's logits were no numbers, or excluded every token


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Wide data that few requests bring, one entry per slot. The host replaces the record when a slot's entry changes.

    A graph reads it only in steps where a live row has it, so the entries of other slots may be stale.

    bias_ids: i32 `[B, MAX_LOGIT_BIAS]`, padded with the vocabulary's size.   bias: f32, the same shape.
    mask: u32 `[B, ceil(V / 32)]`, bit `t % 32` of word `t // 32` is set where token t is allowed.
    block_changes: i32 `[3, U]`, entries of `Rows.block_tables` to set before all else: (slot, index, block),
        slot B for none. None where slots are contiguous.
    draft_masks: u32 `[B, K, ceil(V / 32)]`, the masks behind a row's first, second, ... draft, where the host made
        them; None in an engine without drafts.
    """

    bias_ids: jax.Array
    bias: jax.Array
    mask: jax.Array
    block_changes: jax.Array | None = None
    draft_masks: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The engine's device state besides the cache.

    token: i32 `[B]`, the last sampled token, input of the next step.
    length: i32 `[B]`, valid KV entries; also the index at which `token`'s KV will be written.
    remaining: i32 `[B]`, tokens the row may still sample; 0 means the row is done.
    min_remaining: i32 `[B]`, tokens the row must still sample before it may sample a stop id.
    stop_ids: i32 `[B, E]`, ids that end the row, padded with -1.
    prompt_length: i32 `[B]`, tokens of the prompt.
    history: i32 `[B, S]`, the tokens themselves by position, written as their KV is: valid up to `length`. Where slots
        borrow blocks, `[num_blocks, block_size]`: a block's tokens lie with its keys and values.
    sampling: the request's sampling parameters.
    block_tables: i32 `[B, max_blocks]`, the blocks of each slot, see `graphs.attention.backend`; None: contiguous.
    adapter: i32 `[B]`, which of the loaded adapters the request has, from 1; 0 is none. None: an engine without.

    A row is active while `remaining > 0`; sampling a stop id sets it to 0 on the device, so that a step
    dispatched before the host has seen the token is already right.
    """

    token: jax.Array
    length: jax.Array
    remaining: jax.Array
    min_remaining: jax.Array
    stop_ids: jax.Array
    prompt_length: jax.Array
    history: jax.Array
    sampling: SamplingRows
    block_tables: jax.Array | None = None
    adapter: jax.Array | None = None

    def with_tables(self, tables: Tables) -> Rows:
        """The rows once the changes of block tables in `tables` are made; twice is the same as once."""
        if self.block_tables is None:
            return self
        assert tables.block_changes is not None
        slot, index, block = tables.block_changes
        return replace(self, block_tables=self.block_tables.at[slot, index].set(block, mode="drop"))

    def remember(
        self, slot: jax.Array, position: jax.Array, token: jax.Array, wanted: jax.Array
    ) -> jax.Array:
        """The history with `token` at `position` of `slot` where wanted; all of one shape."""
        row, offset = slot, position
        if self.block_tables is not None:
            size = self.history.shape[1]
            row, offset = self.block_tables[slot, position // size], position % size
        at = self.history.at[targets(row, wanted, len(self.history)), offset]
        return at.set(token, mode="drop", unique_indices=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """`Rows` as they lie between calls. words: u32 `[B, W]`, all that is small, side by side."""

    words: jax.Array
    history: jax.Array
    block_tables: jax.Array | None


def pack_rows(rows: Rows) -> RowState:
    """Rows as they lie between calls."""
    return RowState(words=pack(by_slot(rows)), history=rows.history, block_tables=rows.block_tables)


def unpack_rows(state: RowState, like: Rows) -> Rows:
    """The inverse of `pack_rows`. like: rows, perhaps abstract, of the same widths."""
    small: Rows = unpack(state.words, by_slot(like))
    return replace(small, history=state.history, block_tables=state.block_tables)


def by_slot(rows: T) -> T:
    """`Rows`, or a `RowState`, without what does not have the slot as its leading axis, or is wide."""
    every: Any = rows
    return replace(every, history=None, block_tables=None)


def make_tables(count: int, vocabulary: int, *, has_blocks: bool = False, drafts: int = 0) -> Tables:
    """No bias, everything allowed, no change of blocks (room for one a row), as host arrays. drafts: per row."""
    host: Any = np
    return Tables(
        bias_ids=host.full((count, MAX_LOGIT_BIAS), vocabulary, np.int32),
        bias=host.zeros((count, MAX_LOGIT_BIAS), np.float32),
        mask=host.full((count, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32),
        block_changes=host.full((3, count), count, np.int32) if has_blocks else None,
        draft_masks=(
            host.full((count, drafts, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32) if drafts else None
        ),
    )


class Pool(NamedTuple):
    """`num_blocks` blocks of `block_size` positions, of which a slot borrows `max_blocks` at most."""

    num_blocks: int
    block_size: int
    max_blocks: int


def make_rows(
    count: int,
    stop_width: int,
    positions: int,
    pool: Pool | None = None,
    *,
    dry: bool = False,
    lora: bool = False,
) -> Rows:
    """All rows inactive. positions: S, as in the cache. pool: where slots borrow blocks. dry: as for sampling rows.
    lora: rows may have adapters."""
    return Rows(
        token=jnp.zeros(count, jnp.int32),
        length=jnp.zeros(count, jnp.int32),
        remaining=jnp.zeros(count, jnp.int32),
        min_remaining=jnp.zeros(count, jnp.int32),
        stop_ids=jnp.full((count, stop_width), -1, jnp.int32),
        prompt_length=jnp.zeros(count, jnp.int32),
        history=jnp.zeros((count, positions) if pool is None else pool[:2], jnp.int32),
        sampling=jax.tree.map(jnp.asarray, make_sampling_rows(count, dry=dry)),
        block_tables=None if pool is None else jnp.zeros((count, pool.max_blocks), jnp.int32),
        adapter=jnp.zeros(count, jnp.int32) if lora else None,
    )


def with_remaining(rows: Rows, slot: jax.Array, remaining: jax.Array) -> Rows:
    """The rows when that of `slot` may sample so many tokens more, scalars i32; all else is as it was."""
    return replace(rows, remaining=rows.remaining.at[slot].set(remaining))
