"""Copy a slot's state or blocks of the pool on the device, to the host and back, without changing a byte.

Slots move a span at a time. The backend that laid out keys and values also moves them, all layers of a store at once.
Recurrent states have the slot as their leading axis, with a pool as without. They are copied whole, by
`kv_cache.cache.copy_state`, `read_state` and `write_state`.

With a pool, position p of a slot lies in block `block_tables[slot, p // block_size]` at `p % block_size`, with its
keys, its values and its token: when a block is shared, copied or moved, its tokens go with it. Attention treats a
block as a slot of one span.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.config import KEY_SPAN
from xla_engine.graphs.kv_cache.cache import KVCache, keys_of, with_keys
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import RowState, by_slot

Spans = list[Any]  # one pytree per store of keys and values
Blocks = Any  # one record per store of keys and values and the history, each with a leading axis of blocks
Row = RowState  # without the leading axis; of blocks, without what lies in them


def copy_span(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    source: jax.Array,
    target: jax.Array,
    span: jax.Array,
    length: jax.Array,
) -> tuple[KVCache, RowState]:
    """Give slot `target` the span of `source` and its token history; all scalars i32.

    Positions from `length` on belong to no request: stale NaN must be harmless there afterwards. Recurrent states
    stay: that of `source` is not the one after `length` positions (`kv_cache.cache.copy_state` restores it).
    """
    attention = spec.attention
    moved = [
        attention.write_span(store, target, span, attention.read_span(store, source, span), length)
        for store in keys_of(cache)
    ]
    return with_keys(cache, moved), replace(rows, history=rows.history.at[target].set(rows.history[source]))


def read_span(
    spec: ModelSpec, cache: KVCache, rows: RowState, slot: jax.Array, span: jax.Array
) -> tuple[Spans, Row]:
    """Return a span of a slot, and the slot's row state."""
    spans = [spec.attention.read_span(store, slot, span) for store in keys_of(cache)]
    return spans, jax.tree.map(lambda leaf: leaf[slot], rows)


def write_span(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    slot: jax.Array,
    span: jax.Array,
    length: jax.Array,
    spans: Spans,
    row: Row,
) -> tuple[KVCache, RowState]:
    """The inverse of `read_span`, into any slot; `length` as in `copy_span`."""
    put = jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), rows, row)
    written = [
        spec.attention.write_span(store, slot, span, moved, length)
        for store, moved in zip(keys_of(cache), spans, strict=True)
    ]
    return with_keys(cache, written), put


def num_spans(length: int) -> int:
    """Spans that hold `length` positions."""
    return -(-length // KEY_SPAN)


def blocks_per_call(block_size: int) -> int:
    """The largest number of blocks that one call moves: those of a span."""
    return KEY_SPAN // block_size


def copy_blocks(
    spec: ModelSpec, cache: KVCache, rows: RowState, source: jax.Array, target: jax.Array, count: jax.Array
) -> tuple[KVCache, RowState]:
    """Copy block `source[i]` to block `target[i]` for the first `count` of `[G]`, in order."""

    def copy(index: jax.Array, state: Blocks) -> Blocks:
        return _put(spec, state, target[index], _get(spec, state, source[index]))

    return _with_blocks(cache, rows, lax.fori_loop(0, count, copy, (keys_of(cache), rows.history)))


def read_blocks(
    spec: ModelSpec, cache: KVCache, rows: RowState, slot: jax.Array, blocks: jax.Array
) -> tuple[Blocks, Row]:
    """Return the content of `blocks [G]`, and a slot's row state."""
    stores = keys_of(cache)
    found = lax.map(lambda block: _get(spec, (stores, rows.history), block), blocks)
    return found, jax.tree.map(lambda leaf: leaf[slot], by_slot(rows))


def write_blocks(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    slot: jax.Array,
    blocks: jax.Array,
    first: jax.Array,
    end: jax.Array,
    moved: Blocks,
    row: Row,
) -> tuple[KVCache, RowState]:
    """The inverse of `read_blocks`, into any slot; of `blocks [G]`, those from `first` up to `end` are written."""

    put = jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), by_slot(rows), row)
    cache, written = load_blocks(spec, cache, rows, blocks, first, end, moved)
    return cache, replace(put, history=written.history, block_tables=rows.block_tables)


def load_blocks(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    blocks: jax.Array,
    first: jax.Array,
    end: jax.Array,
    moved: Blocks,
) -> tuple[KVCache, RowState]:
    """Write the content `moved` into those of `blocks [G]` from `first` up to `end`, in order."""

    def write(index: jax.Array, state: Blocks) -> Blocks:
        return _put(spec, state, blocks[index], jax.tree.map(lambda leaf: leaf[index], moved))

    return _with_blocks(cache, rows, lax.fori_loop(first, end, write, (keys_of(cache), rows.history)))


def _get(spec: ModelSpec, state: Blocks, block: jax.Array) -> Blocks:
    stores, history = state
    return [spec.attention.read_span(store, block, jnp.int32(0)) for store in stores], history[block]


def _put(spec: ModelSpec, state: Blocks, block: jax.Array, content: Blocks) -> Blocks:
    (stores, history), (spans, tokens) = state, content
    first, length = jnp.int32(0), jnp.int32(history.shape[1])
    written = [
        spec.attention.write_span(store, block, first, LayerCache(*moved), length)
        for store, moved in zip(stores, spans, strict=True)
    ]
    return written, history.at[block].set(tokens)


def _with_blocks(cache: KVCache, rows: RowState, state: Blocks) -> tuple[KVCache, RowState]:
    stores, history = state
    return with_keys(cache, stores), replace(rows, history=history)
