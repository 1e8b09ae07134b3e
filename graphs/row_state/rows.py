"""The device state of the rows: everything that a decode step needs to know about a request, one entry per slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.row_state.limits import MAX_LOGIT_BIAS
from xla_engine.graphs.row_state.sampling_fields import SamplingRows, make_sampling_rows

WORD = jnp.uint32


def pack(record: Any) -> Any:
    """Concatenate the leaves `[N, ...]` of a record, four-byte elements or bools, to u32 `[N, W]`.

    One array in place of many, because a call pays for each buffer, above all for outputs (findings/host_time.md). XLA
    sees that what `unpack` has taken apart, and nobody has changed, is a slice of the words it came from.

    Returns a numpy array if the leaves are numpy arrays.
    """
    leaves = jax.tree.leaves(record)
    columns = [_words(leaf.reshape(leaf.shape[0], -1)) for leaf in leaves]
    on_host = isinstance(leaves[0], np.ndarray)
    return np.concatenate(columns, 1) if on_host else jnp.concatenate(columns, 1)


def unpack(words: jax.Array, like: Any) -> Any:
    """The inverse of `pack`. like: a record with the same dtypes and shapes, except for the leading axis."""
    leaves, tree = jax.tree.flatten(like)
    found, at = [], 0
    for leaf in leaves:
        width = int(np.prod(leaf.shape[1:]))
        column = words[:, at : at + width]
        at += width
        is_bool = leaf.dtype == jnp.bool_
        column = column != 0 if is_bool else jax.lax.bitcast_convert_type(column, leaf.dtype)
        found.append(column.reshape(words.shape[0], *leaf.shape[1:]))
    assert at == words.shape[1], f"{words.shape[1]} words a row, the record has {at}"
    return jax.tree.unflatten(tree, found)


def _words(leaf: Any) -> Any:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(WORD)
    return leaf.view(WORD) if isinstance(leaf, np.ndarray) else jax.lax.bitcast_convert_type(leaf, WORD)


class Extents(NamedTuple):
    """Lane p holds positions `start[p] .. start[p] + size[p]` of slot `slot[p]`; each i32 `[P]`.

    Consecutive lanes may hold consecutive chunks of one prompt. A lane of size 0 is empty.
    """

    slot: jax.Array
    start: jax.Array
    size: jax.Array


def targets(row: jax.Array, wanted: jax.Array, rows: int) -> jax.Array:
    """The indices for `put`: `row` if `wanted`, otherwise distinct indices out of bounds, so that all are unique.

    rows: the number of rows.
    """
    return jnp.where(wanted, row, rows + jnp.arange(wanted.size, dtype=jnp.int32).reshape(wanted.shape))


def put(leaf: jax.Array, target: jax.Array, new: jax.Array) -> jax.Array:
    """`leaf [B, ...]` with `new [P, ...]` written to the rows `target [P]`, which come from `targets`."""
    return leaf.at[target].set(new, mode="drop", unique_indices=True)


T = TypeVar("T", "Rows", "RowState")

NOT_KEPT = -3  # in place of a token that was sampled after a wrong draft
NO_CHOICE = -2  # in place of a sampled token: the row's logits were not finite, or no token was allowed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Wide data that few requests need, one entry per slot. The host replaces the record when a slot's entry changes.

    A graph reads an entry only for live rows that use it, so the entries of other slots may be stale.

    bias_ids: i32 `[B, MAX_LOGIT_BIAS]`, padded with the vocabulary's size.   bias: f32, the same shape.
    mask: u32 `[B, ceil(V / 32)]`, bit `t % 32` of word `t // 32` is set if token t is allowed.
    block_changes: i32 `[3, U]`, changes of `Rows.block_tables` that are made first: (slot, index, block), slot B for
        none. None without a block pool.
    draft_masks: u32 `[B, K, ceil(V / 32)]`, the masks after a row's first, second, ... draft, if the host made them;
        None without speculation.
    """

    bias_ids: jax.Array
    bias: jax.Array
    mask: jax.Array
    block_changes: jax.Array | None = None
    draft_masks: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The engine's device state apart from the cache.

    token: i32 `[B]`, the last sampled token, input of the next step.
    length: i32 `[B]`, valid KV entries; also the index at which `token`'s KV will be written.
    remaining: i32 `[B]`, tokens the row may still sample; 0 means the row is done.
    min_remaining: i32 `[B]`, tokens the row must still sample before it may sample a stop id.
    stop_ids: i32 `[B, E]`, ids that end the row, padded with -1.
    prompt_length: i32 `[B]`, tokens of the prompt.
    history: i32 `[B, S]`, the tokens by position, written together with their KV: valid up to `length`. With a block
        pool `[num_blocks, block_size]`, indexed by block like the keys and values.
    sampling: the request's sampling parameters.
    block_tables: i32 `[B, max_blocks]`, the blocks of each slot, see `graphs.attention.backend`; None: contiguous.
    adapter: i32 `[B]`, the request's adapter slot, from 1; 0 is none. None in an engine without adapters.
    rope_offset: i32 `[B]`, what is added to a new token's place in the slot to get the position by which its key and
        query turn, at most 0: a picture's tokens share positions. None in an engine in which they do not.

    A row is active while `remaining > 0`. Sampling a stop id sets it to 0 on the device, so that steps dispatched
    before the host has seen the token are already correct.
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
    rope_offset: jax.Array | None = None

    def with_tables(self, tables: Tables) -> Rows:
        """The rows with the changes of block tables in `tables` applied; idempotent."""
        if self.block_tables is None:
            return self
        assert tables.block_changes is not None
        slot, index, block = tables.block_changes
        return replace(self, block_tables=self.block_tables.at[slot, index].set(block, mode="drop"))

    def remember(
        self, slot: jax.Array, position: jax.Array, token: jax.Array, wanted: jax.Array
    ) -> jax.Array:
        """The history with `token` written to `position` of `slot` if `wanted`; all have the same shape."""
        row, offset = slot, position
        if self.block_tables is not None:
            size = self.history.shape[1]
            row, offset = self.block_tables[slot, position // size], position % size
        at = self.history.at[targets(row, wanted, len(self.history)), offset]
        return at.set(token, mode="drop", unique_indices=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """`Rows` packed between calls. words: u32 `[B, W]`, all small fields concatenated."""

    words: jax.Array
    history: jax.Array
    block_tables: jax.Array | None


def pack_rows(rows: Rows) -> RowState:
    """Pack rows for the time between calls."""
    return RowState(words=pack(by_slot(rows)), history=rows.history, block_tables=rows.block_tables)


def unpack_rows(state: RowState, like: Rows) -> Rows:
    """The inverse of `pack_rows`. like: rows of the same widths, perhaps abstract."""
    small: Rows = unpack(state.words, by_slot(like))
    return replace(small, history=state.history, block_tables=state.block_tables)


def by_slot(rows: T) -> T:
    """`Rows` or `RowState` without the wide fields and those whose leading axis is not the slot."""
    every: Any = rows
    return replace(every, history=None, block_tables=None)


def some_rows(rows: Rows, slot: jax.Array) -> Rows:
    """The small fields of the rows `slot [P]`, by one gather in place of one for each field."""
    small = by_slot(rows)
    found: Rows = unpack(pack(small)[slot], small)
    return found


def with_rows(rows: Rows, target: jax.Array, new: Rows) -> Rows:
    """`rows` with the small fields of `new`, written to the rows `target [P]` (`lanes.put`) by one scatter."""
    words = put(pack(by_slot(rows)), target, pack(by_slot(new)))
    return unpack_rows(RowState(words=words, history=rows.history, block_tables=rows.block_tables), rows)


def make_tables(count: int, vocabulary: int, *, has_blocks: bool = False, drafts: int = 0) -> Tables:
    """Neutral tables as host arrays: no bias, all tokens allowed, no block changes (room for one per row).

    drafts: masks for drafts per row; 0: none.
    """
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
    """A pool of `num_blocks` blocks of `block_size` positions; a slot uses at most `max_blocks`."""

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
    rope_offsets: bool = False,
) -> Rows:
    """Inactive rows.

    positions: S, as in the cache. pool: the block pool, if there is one. dry: as in `make_sampling_rows`. lora: rows
    may have adapters. rope_offsets: rows have `Rows.rope_offset`.
    """
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
        rope_offset=jnp.zeros(count, jnp.int32) if rope_offsets else None,
    )


def with_remaining(rows: Rows, slot: jax.Array, remaining: jax.Array) -> Rows:
    """The rows with `remaining` set for one `slot`; both are i32 scalars."""
    return replace(rows, remaining=rows.remaining.at[slot].set(remaining))
