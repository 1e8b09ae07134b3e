"""Copy a slot's state to another slot, to the host and back, a span at a time and without changing a byte.

The backend that laid out keys and values also moves them, all layers of a store at once. Other state of a layer (a
recurrent state) has the slot as its leading axis. It is copied whole with every span to the host or back, and not from
slot to slot.
"""

import dataclasses
from typing import Any

import jax

from xla_engine.graphs.attention.backend import KEY_SPAN, LayerCache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import RowState

Spans = list[Any]  # one pytree per store
Row = RowState  # without the leading axis


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
    stay: that of `source` is not the one after `length` positions (`graphs.kv_cache.recurrent_states` restores it).
    """
    attention = spec.attention
    moved: KVCache = [
        attention.write_span(store, target, span, attention.read_span(store, source, span), length)
        if isinstance(store, LayerCache)
        else store
        for store in cache
    ]
    return moved, _with_history(rows, target, rows.history[source])


def read_span(
    spec: ModelSpec, cache: KVCache, rows: RowState, slot: jax.Array, span: jax.Array
) -> tuple[Spans, Row]:
    """Return a span of a slot, and the slot's row state."""
    return _read(spec, cache, slot, span), jax.tree.map(lambda leaf: leaf[slot], rows)


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
    return _write(spec, cache, slot, span, spans, length), put


def num_spans(length: int) -> int:
    """Spans that hold `length` positions."""
    return -(-length // KEY_SPAN)


def _read(spec: ModelSpec, cache: KVCache, slot: jax.Array, span: jax.Array) -> Spans:
    return [
        spec.attention.read_span(store, slot, span)
        if isinstance(store, LayerCache)
        else jax.tree.map(lambda leaf: leaf[slot], store)
        for store in cache
    ]


def _write(
    spec: ModelSpec, cache: KVCache, slot: jax.Array, span: jax.Array, spans: Spans, length: jax.Array
) -> KVCache:
    return [
        spec.attention.write_span(store, slot, span, moved, length)
        if isinstance(store, LayerCache)
        else jax.tree.map(lambda leaf, value: leaf.at[slot].set(value), store, moved)
        for store, moved in zip(cache, spans, strict=True)
    ]


def _with_history(rows: RowState, slot: jax.Array, history: jax.Array) -> RowState:
    return dataclasses.replace(rows, history=rows.history.at[slot].set(history))
