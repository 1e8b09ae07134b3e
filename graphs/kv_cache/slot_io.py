"""Moving what a slot holds: to another slot, to the host and back. Bytes move as they are, a block of keys at a time.

Keys and values are moved by the backend that laid them out, of all layers of a store at once. Anything else a layer
keeps per slot (a recurrent state) has the slot as its leading axis and moves whole with every block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from xla_engine.graphs.attention.backend import KEY_SPAN, LayerCache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import RowState

Blocks = list[Any]  # one pytree per store
Row = RowState  # without the leading axis


def copy_span(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    source: jax.Array,
    target: jax.Array,
    block: jax.Array,
    length: jax.Array,
) -> tuple[KVCache, RowState]:
    """Give slot `target` the block of `source` and its token history; all scalars i32.

    Positions from `length` on are nobody's: stale NaN must be harmless there afterwards.
    """
    moved = _write(spec, cache, target, block, _read(spec, cache, source, block), length)
    return moved, _with_history(rows, target, rows.history[source])


def read_span(
    spec: ModelSpec, cache: KVCache, rows: RowState, slot: jax.Array, block: jax.Array
) -> tuple[Blocks, Row]:
    """A block of a slot, and the slot's row state."""
    return _read(spec, cache, slot, block), jax.tree.map(lambda leaf: leaf[slot], rows)


def write_span(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    slot: jax.Array,
    block: jax.Array,
    length: jax.Array,
    blocks: Blocks,
    row: Row,
) -> tuple[KVCache, RowState]:
    """The inverse of `read_span`, into any slot; `length` as in `copy_span`."""
    put = jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), rows, row)
    return _write(spec, cache, slot, block, blocks, length), put


def num_blocks(length: int) -> int:
    """Blocks that hold `length` positions."""
    return -(-length // KEY_SPAN)


def _read(spec: ModelSpec, cache: KVCache, slot: jax.Array, block: jax.Array) -> Blocks:
    return [
        spec.attention.read_span(store, slot, block)
        if isinstance(store, LayerCache)
        else jax.tree.map(lambda leaf: leaf[slot], store)
        for store in cache
    ]


def _write(
    spec: ModelSpec, cache: KVCache, slot: jax.Array, block: jax.Array, blocks: Blocks, length: jax.Array
) -> KVCache:
    return [
        spec.attention.write_span(store, slot, block, moved, length)
        if isinstance(store, LayerCache)
        else jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), store, moved)
        for store, moved in zip(cache, blocks, strict=True)
    ]


def _with_history(rows: RowState, slot: jax.Array, history: jax.Array) -> RowState:
    return dataclasses.replace(rows, history=rows.history.at[slot].set(history))
