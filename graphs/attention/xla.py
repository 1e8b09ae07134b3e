"""Attention backend `xla`: pure JAX, on any platform.

One K and one V buffer per layer, `[J, B, KV, span, Dh]` for J spans of keys, donated and written in place: a shorter
`key_length` is the front of the buffer (findings/kv_cache.md). A write that must not happen goes to a row beyond
the last one and is dropped. Keys a query must not see are masked before the softmax, and stale
values are never NaN inside an owned slot, because `clear_values` zeroes V when a slot is handed over: 0 * NaN would
otherwise survive the masked probabilities.

Scores, softmax and sums are float32; probabilities are rounded to the compute dtype for the second product. Keys are
taken in spans of fixed size: both products see the same shapes whatever the `key_length` (a static bucket over the
valid keys), and spans are added in order, so that masked spans behind a row's own keys change no bit of it. With KV
blocks, one span at a time is gathered for each of the products: the context is never gathered as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.attention.backend import (
    AttentionCall,
    LayerCache,
    check_length,
    kept_positions,
)
from xla_engine.graphs.config import KEY_SPAN, ModelConfig
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import normed_and_rotated, split_heads
from xla_engine.graphs.row_state.rows import Extents, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaAttention:
    """See `graphs.attention.backend.Attention`.

    cache_dtype: what keys and values are stored in; None: as computed. call_positions: see `kept_positions`.
    """

    cache_dtype: jnp.dtype | None = None
    call_positions: int | None = None
    name = "xla"
    isa = None
    bounded_by_length = False
    shares_stores = False  # XLA:CPU would copy a layer out of it

    def make_store(
        self, config: ModelConfig, layers: Sequence[int], rows: int, length: int, dtype: jnp.dtype
    ) -> LayerCache:
        check_length(length)
        (index,) = layers
        span = min(length, KEY_SPAN)
        stored = self.cache_dtype or dtype
        kept = kept_positions(config.attention(index), length, self.call_positions)
        sizes = config.layer(index)
        shape = (kept // span, rows, sizes.num_key_value_heads, span, sizes.head_dim)
        valued = shape if config.latent is None else (*shape[:2], 0, *shape[3:])
        return LayerCache(jnp.zeros(shape, stored), jnp.zeros(valued, stored))

    def clear_values(self, layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
        own = "keys" if _is_latent(layer) else "values"
        leaf = getattr(layer, own)
        spans, rows, *shape = leaf.shape
        empty = jnp.zeros((spans, slot.shape[0], *shape), leaf.dtype)
        at = leaf.at[:, targets(slot, fresh, rows)]
        return layer._replace(**{own: at.set(empty, mode="drop", unique_indices=True)})

    def attend_decode(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, *, length: jax.Array, live: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        rows, (_, _, kv_heads, _, head_dim) = len(length), layer.keys.shape
        q, k, v = split_heads(qkv, kv_heads, head_dim, call.form)
        row = jnp.arange(rows, dtype=jnp.int32)
        q, k = _normed_and_rotated(q, k, call)
        layer = _written(layer, (k, v), call, row, length, live)
        spans: _Slots | _Blocks
        if call.block_tables is None:
            used = call.key_length // KEY_SPAN
            spans = _Slots(*(leaf[:used].astype(call.compute_dtype) for leaf in _read(layer)))
        else:
            spans = _Blocks(_read(layer), call.block_tables, length, call.key_length, call.compute_dtype)
        visible = _visible(
            length[:, None], spans.positions, call.form.window, _capacity(layer, call)
        )  # [B, 1, S]
        grouped = q.reshape(rows, kv_heads, -1, head_dim)  # [B, KV, G, Dh]
        sinks = call.weights.sinks
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
        out = _attention(grouped, spans, visible, call.form, sinks, keys_left=True)
        return layer, out.reshape(rows, -1)

    def attend_prefill(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        slot, start, count = lanes
        number, width = call.rope.shape[:2]
        kv_heads, head_dim = layer.keys.shape[2], layer.keys.shape[4]
        by_row = split_heads(qkv, kv_heads, head_dim, call.form)
        q, k, v = (x.reshape(number, width, -1, head_dim) for x in by_row)
        offset = jnp.arange(width, dtype=jnp.int32)
        position = start[:, None] + offset  # [P, T]
        wanted = offset < count[:, None]
        q, k = _normed_and_rotated(q, k, call)
        layer = _written(layer, (k, v), call, slot[:, None], position, wanted)
        spans: _Slots | _Blocks
        if call.block_tables is None:
            used = call.key_length // KEY_SPAN
            spans = _Slots(*(leaf[:used, slot].astype(call.compute_dtype) for leaf in _read(layer)))
        else:
            tables, last = call.block_tables[slot], start + count - 1
            if call.reach is not None:
                last = jnp.max(jnp.where(wanted, call.reach - 1, 0), axis=1)
            spans = _Blocks(_read(layer), tables, last, call.key_length, call.compute_dtype)
        visible = _visible(
            position, spans.positions, call.form.window, _capacity(layer, call), call.reach
        )  # [P, T, S]
        # Queries of one key/value head side by side: [P, KV, T * G, Dh]
        grouped = q.reshape(number, width, kv_heads, -1, head_dim).swapaxes(1, 2)
        sinks = call.weights.sinks
        sinks = None if sinks is None else jnp.tile(sinks.reshape(kv_heads, -1), width)
        out = _attention(
            grouped.reshape(number, kv_heads, -1, head_dim),
            spans,
            jnp.repeat(visible, q.shape[2] // kv_heads, axis=1),  # [P, T * G, S]
            call.form,
            sinks,
            keys_left=False,
            added=_added(call, position, spans.positions, kv_heads),
        )
        by_token = out.reshape(number, kv_heads, width, -1, head_dim).swapaxes(1, 2)
        return layer, by_token.reshape(number * width, -1)

    def read_span(self, layer: LayerCache, slot: jax.Array, span: jax.Array) -> LayerCache:
        return LayerCache(*(leaf[span % len(leaf), slot] for leaf in layer))

    def write_span(
        self, layer: LayerCache, slot: jax.Array, span: jax.Array, moved: LayerCache, length: jax.Array
    ) -> LayerCache:
        position = span * KEY_SPAN + jnp.arange(layer.keys.shape[3], dtype=jnp.int32)
        own, round_again = span % len(layer.keys), span >= len(layer.keys)  # of a ring, which is full then
        owned = (position < length) | round_again

        def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(owned[:, None], new, jnp.zeros((), new.dtype))
            return leaf.at[own, slot].set(
                jnp.where(round_again & (position[0] >= length), leaf[own, slot], new)
            )

        return LayerCache(*(write(leaf, new) for leaf, new in zip(layer, moved, strict=True)))


def _is_latent(layer: LayerCache) -> bool:
    """Whether keys are the values."""
    return layer.values.shape[2] == 0


def _read(layer: LayerCache) -> LayerCache:
    """The keys and values that queries read."""
    return layer._replace(values=layer.keys) if _is_latent(layer) else layer


class _Slots(NamedTuple):
    """Keys and values `[J, N, KV, span, Dh]` of N rows, as they lie in the cache."""

    keys: jax.Array
    values: jax.Array

    @property
    def positions(self) -> int:
        return len(self.keys) * KEY_SPAN

    def scores(self, q: jax.Array, *, keys_left: bool) -> jax.Array:
        """Products of `q [N, KV, R, Dh]` with all keys, `[J, N, KV, R, span]`."""
        return _scores(jnp.broadcast_to(q, (len(self.keys), *q.shape)), self.keys, keys_left=keys_left)

    def weigh(self, weights: jax.Array) -> jax.Array:
        """Values weighted by `[J, N, KV, R, span]`, summed from the first span to the last: `[N, KV, R, Dh]`."""
        return _in_order(_product(weights.astype(self.values.dtype), self.values))


class _Blocks(NamedTuple):
    """The same of rows with `tables [N, max_blocks]`, in a pool: one span at a time is fetched from its blocks.

    Values behind `last [N]` are zero.
    """

    pool: LayerCache
    tables: jax.Array
    last: jax.Array
    positions: int
    dtype: jnp.dtype

    def scores(self, q: jax.Array, *, keys_left: bool) -> jax.Array:
        def score(span: jax.Array) -> jax.Array:
            return _scores(q, self._fetch(self.pool.keys, span), keys_left=keys_left)

        return lax.map(score, jnp.arange(self._spans, dtype=jnp.int32))

    def weigh(self, weights: jax.Array) -> jax.Array:
        def part(span: jax.Array) -> jax.Array:
            position = span * KEY_SPAN + jnp.arange(KEY_SPAN, dtype=jnp.int32)
            inside = (position <= self.last[:, None])[:, None, :, None]  # [N, 1, span, 1]
            values = jnp.where(inside, self._fetch(self.pool.values, span), 0)
            return _product(weights[span].astype(values.dtype), values)

        return lax.fori_loop(1, self._spans, lambda span, total: total + part(span), part(jnp.int32(0)))

    @property
    def _spans(self) -> int:
        return self.positions // KEY_SPAN

    def _fetch(self, leaf: jax.Array, span: jax.Array) -> jax.Array:
        """One span of every row, `[N, KV, span, Dh]`."""
        many = KEY_SPAN // leaf.shape[3]
        blocks = lax.dynamic_slice_in_dim(self.tables, span * many, many, axis=1)  # [N, many]
        parts = leaf.at[0, blocks].get(mode="clip").swapaxes(1, 2)  # [N, KV, many, block_size, Dh]
        return parts.reshape(*parts.shape[:2], KEY_SPAN, -1).astype(self.dtype)


def _normed_and_rotated(q: jax.Array, k: jax.Array, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Query and key heads `[..., heads, Dh]` as attention takes them."""
    norms = call.weights.q_norm, call.weights.k_norm
    q, k = (normed_and_rotated(x, call.form, own, call.rope) for x, own in zip((q, k), norms, strict=True))
    return q, k


def _added(call: AttentionCall, position: jax.Array, keys: int, kv_heads: int) -> jax.Array | None:
    """What distances add to the scores of queries at `position [P, T]`: `[J, P, KV, T * G, span]`."""
    table = call.weights.distances
    if table is None:
        return None
    column = table.shape[1] // 2 + jnp.arange(keys, dtype=jnp.int32) - position[:, :, None]  # [P, T, S]
    found = jnp.take(table, column, axis=1, mode="clip")  # [H, P, T, S]
    found = found.reshape(kv_heads, -1, *position.shape, keys // KEY_SPAN, KEY_SPAN)
    found = found.transpose(4, 2, 0, 3, 1, 5)  # [J, P, KV, T, G, span]
    return found.reshape(*found.shape[:3], -1, KEY_SPAN)


def _capacity(layer: LayerCache, call: AttentionCall) -> int | None:
    """Positions of a slot's ring; None for blocks, which do not repeat."""
    return None if call.block_tables is not None else len(layer.keys) * KEY_SPAN


def _visible(
    position: jax.Array, keys: int, window: int | None, capacity: int | None, reach: jax.Array | None = None
) -> jax.Array:
    """Which keys the queries at `position [N, R]` see: `[N, R, S]`. reach: as in `AttentionCall`.

    A slot of `capacity` positions may be a ring: a query sees what was written less than a window before its own key.
    What has been written since lies further back, going round. None: blocks, which do not repeat.
    """
    last, key = position[:, :, None], jnp.arange(keys, dtype=jnp.int32)
    if reach is not None:
        last = reach[:, :, None] - 1
    if window is None:
        return key <= last
    seen = window if reach is None else last - position[:, :, None] + window
    age = last - key if capacity is None else (last - key) % capacity
    return (age >= 0) & (age < jnp.minimum(seen, last + 1))


def _attention(
    q: jax.Array,
    spans: _Slots | _Blocks,
    visible: jax.Array,
    form: AttentionForm,
    sinks: jax.Array | None,
    *,
    keys_left: bool,
    added: jax.Array | None = None,
) -> jax.Array:
    """Masked softmax attention: q `[N, KV, R, Dh]`, visible `[N, R|1, S]`, sinks `[KV, R]`, added as in `_added`.

    `keys_left` makes the keys the left operand of the first product, which XLA:CPU does not re-pack: for few rows R.
    """
    scores = spans.scores(q, keys_left=keys_left) * form.scale  # [J, N, KV, R, span]
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    scores = scores if added is None else scores + added
    seen = visible.reshape(*visible.shape[:2], -1, KEY_SPAN)
    scores = jnp.where(jnp.moveaxis(seen, 2, 0)[:, :, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=(0, 4), keepdims=True)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks[:, :, None])
    weights = jnp.exp(scores - peak)
    weighted = spans.weigh(weights)  # [N, KV, R, Dh]
    total = _in_order(sum_last(weights))
    if sinks is not None:
        total = total + jnp.exp(sinks[:, :, None] - peak[0])
    return weighted / total


def _in_order(parts: jax.Array) -> jax.Array:
    """Sum `parts [J, ...]` from the first span to the last."""
    total = parts[0]
    for span in range(1, parts.shape[0]):
        total = total + parts[span]
    return total


def _scores(q: jax.Array, keys: jax.Array, *, keys_left: bool) -> jax.Array:
    """`q [..., R, Dh]` by `keys [..., span, Dh]`: `[..., R, span]`."""
    q = q.astype(keys.dtype)
    if keys_left:
        return lax.optimization_barrier(_product(keys, q, transposed=True)).swapaxes(-1, -2)
    return _product(q, keys, transposed=True)


def _product(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Matrix products over equal leading axes, float32 out; `transposed`: with the last axis of right."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    batch = tuple(range(left.ndim - 2))
    return lax.dot_general(
        left,
        right,
        (((left.ndim - 1,), (right.ndim - (1 if transposed else 2),)), (batch, batch)),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _written(
    layer: LayerCache,
    new: tuple[jax.Array, jax.Array],
    call: AttentionCall,
    slot: jax.Array,
    position: jax.Array,
    wanted: jax.Array,
) -> LayerCache:
    """The cache with the keys and values `new [..., KV, Dh]`, if the layer has its own."""
    if not call.form.stored_parts:
        return layer
    keys, values = (
        leaf
        if 0 in leaf.shape
        else _scatter(leaf, each.astype(call.compute_dtype), slot, position, wanted, call.block_tables)
        for leaf, each in zip(layer, new, strict=True)
    )
    return LayerCache(keys, values)


def _scatter(
    cache: jax.Array,
    new: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    wanted: jax.Array,
    tables: jax.Array | None,
) -> jax.Array:
    """Set `position` of `slot` to `new [..., KV, Dh]` where wanted."""
    spans, rows, _, size, _ = cache.shape
    span, row = (position // size % spans, slot) if tables is None else (0, tables[slot, position // size])
    at = cache.at[span, targets(row, wanted, rows), :, position % size]
    return at.set(new.astype(cache.dtype), mode="drop", unique_indices=True)
