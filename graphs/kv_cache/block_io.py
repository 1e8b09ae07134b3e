"""Pages of a pool: what a token's position means in them, and moving them as they are.

A slot's position p lies in page `block_tables[slot, p // block_size]` at `p % block_size`, with its keys, its values
and its token: whoever shares, copies or moves a page has the token history as well.

For the attention a page is a slot of one block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.attention.backend import KEY_SPAN, LayerCache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import RowState

Pages = Any  # one record per store and the history, each with a leading axis of pages
Row = RowState  # without the leading axis, and without what lies in pages


def pages_per_call(block_size: int) -> int:
    """Pages that one call moves at most: those of a key block."""
    return KEY_SPAN // block_size


def copy_blocks(
    spec: ModelSpec, cache: KVCache, rows: RowState, source: jax.Array, target: jax.Array, count: jax.Array
) -> tuple[KVCache, RowState]:
    """Page `target[i]` becomes what `source[i]` is, for the first `count` of `[G]`, in order."""

    def copy(index: jax.Array, state: Pages) -> Pages:
        return _put(spec, state, target[index], _get(spec, state, source[index]))

    return _with_history(rows, lax.fori_loop(0, count, copy, (cache, rows.history)))


def read_blocks(
    spec: ModelSpec, cache: KVCache, rows: RowState, slot: jax.Array, pages: jax.Array
) -> tuple[Pages, Row]:
    """The content of `pages [G]`, and a slot's row state."""
    found = lax.map(lambda page: _get(spec, (cache, rows.history), page), pages)
    return found, jax.tree.map(lambda leaf: leaf[slot], _own(rows))


def write_blocks(
    spec: ModelSpec,
    cache: KVCache,
    rows: RowState,
    slot: jax.Array,
    pages: jax.Array,
    first: jax.Array,
    end: jax.Array,
    moved: Pages,
    row: Row,
) -> tuple[KVCache, RowState]:
    """The inverse of `read_blocks`, into any slot and of `pages [G]` into those from `first` to before `end`."""

    def write(index: jax.Array, state: Pages) -> Pages:
        return _put(spec, state, pages[index], jax.tree.map(lambda leaf: leaf[index], moved))

    put = jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), _own(rows), row)
    cache, written = _with_history(rows, lax.fori_loop(first, end, write, (cache, rows.history)))
    return cache, replace(put, history=written.history, block_tables=rows.block_tables)


def _own(rows: RowState) -> Row:
    """Row state without what is not by slot."""
    every: Any = rows
    return replace(every, history=None, block_tables=None)


def _get(spec: ModelSpec, state: Pages, page: jax.Array) -> Pages:
    cache, history = state
    return [spec.attention.read_span(store, page, jnp.int32(0)) for store in cache], history[page]


def _put(spec: ModelSpec, state: Pages, page: jax.Array, content: Pages) -> Pages:
    (cache, history), (blocks, tokens) = state, content
    first, length = jnp.int32(0), jnp.int32(history.shape[1])
    stores = [
        spec.attention.write_span(store, page, first, LayerCache(*moved), length)
        for store, moved in zip(cache, blocks, strict=True)
    ]
    return stores, history.at[page].set(tokens)


def _with_history(rows: RowState, state: Pages) -> tuple[KVCache, RowState]:
    cache, history = state
    return cache, replace(rows, history=history)
