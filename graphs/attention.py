"""Attention backend `xla`: cache layout, KV write and attention are owned together.

One K and one V buffer per layer, `[B, KV, S, Dh]`, donated and written in place. A write that must not happen
(inactive row, padding of a chunk) goes to a position beyond S and is dropped. Keys a query must not see are masked
before the softmax and stale values are never NaN inside an owned slot, because `clear_values` zeroes V when a slot
is handed over: 0 * NaN would otherwise survive the masked probabilities.

Scores, softmax and sums are float32; probabilities are rounded to the compute dtype for the second product. Keys are
taken in blocks of fixed size: both products see the same shapes whatever the `key_length` (a static bucket over the
valid keys), and blocks are added in order, so that masked blocks behind a row's own keys change no bit of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from graphs.config import ModelConfig
from graphs.sums import sum_last

KEY_BLOCK = 256  # keys per block; cache lengths and key buckets are multiples of it (findings/007)


class LayerCache(NamedTuple):
    """Keys and values of one layer for all slots: each `[B, KV, S, Dh]`."""

    keys: jax.Array
    values: jax.Array


KVCache = list[LayerCache]


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole key blocks."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def make_cache(config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """A zeroed cache for `rows` slots of `length` positions, whole blocks."""
    assert length == whole_blocks(length), length
    shape = (rows, config.num_key_value_heads, length, config.head_dim)
    return [
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)
    ]


def clear_values(layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
    """Zero V of `slot [P]` where `fresh [P]`: the slot has a new owner."""
    rows = layer.values.shape[0]
    target = jnp.where(fresh, slot, rows + jnp.arange(slot.shape[0], dtype=slot.dtype))
    empty = jnp.zeros((slot.shape[0], *layer.values.shape[1:]), layer.values.dtype)
    return layer._replace(values=layer.values.at[target].set(empty, mode="drop", unique_indices=True))


def attend_decode(
    layer: LayerCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    length: jax.Array,
    live: jax.Array,
    key_length: int,
    compute_dtype: jnp.dtype,
) -> tuple[LayerCache, jax.Array]:
    """Write one position per live row, then attend to the row's own keys.

    q `[B, H, Dh]`, k and v `[B, KV, Dh]` float32; `length [B]` is the write index; `live [B]` rows write.
    Returns the cache and `[B, H, Dh]` float32.
    """
    rows, kv_heads, positions, _ = layer.keys.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    position = jnp.where(live, length, positions)  # out of bounds: dropped
    layer = LayerCache(
        _scatter(layer.keys, k.astype(compute_dtype), row, position),
        _scatter(layer.values, v.astype(compute_dtype), row, position),
    )
    keys = layer.keys[:, :, :key_length].astype(compute_dtype)
    values = layer.values[:, :, :key_length].astype(compute_dtype)
    visible = jnp.arange(key_length, dtype=jnp.int32) <= length[:, None]  # [B, S]
    grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])  # [B, KV, G, Dh]
    return layer, _attention(grouped, keys, values, visible[:, None, None], keys_left=True).reshape(q.shape)


def attend_prefill(
    layer: LayerCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
    key_length: int,
    compute_dtype: jnp.dtype,
) -> tuple[LayerCache, jax.Array]:
    """Write up to T positions of each lane into its slot, then attend causally to all keys the slot holds.

    q `[P, T, H, Dh]`, k and v `[P, T, KV, Dh]` float32; `slot`, `start`, `count` `[P]`: lane p holds positions
    `start[p] .. start[p] + count[p]` of slot `slot[p]`. Consecutive lanes may hold consecutive chunks of one prompt:
    every lane's keys are written before any lane reads. Returns the cache and `[P, T, H, Dh]` float32.
    """
    lanes, width, heads, head_dim = q.shape
    _, kv_heads, positions, _ = layer.keys.shape
    offset = jnp.arange(width, dtype=jnp.int32)
    position = start[:, None] + offset  # [P, T]
    # Padding goes out of bounds; indices stay unique as the scatter promises.
    lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
    target = jnp.where(offset < count[:, None], position, positions + lane * width + offset)
    layer = LayerCache(
        _scatter(layer.keys, k.astype(compute_dtype), slot[:, None], target),
        _scatter(layer.values, v.astype(compute_dtype), slot[:, None], target),
    )
    keys = layer.keys[slot, :, :key_length].astype(compute_dtype)  # [P, KV, S, Dh]
    values = layer.values[slot, :, :key_length].astype(compute_dtype)
    visible = jnp.arange(key_length, dtype=jnp.int32) <= position[:, :, None]  # [P, T, S]
    # Queries of one key/value head side by side: [P, KV, T * G, Dh]
    grouped = q.reshape(lanes, width, kv_heads, -1, head_dim).swapaxes(1, 2)
    out = _attention(
        grouped.reshape(lanes, kv_heads, -1, head_dim),
        keys,
        values,
        _per_group(visible, heads // kv_heads),
        keys_left=False,
    )
    return layer, out.reshape(lanes, kv_heads, width, -1, head_dim).swapaxes(1, 2).reshape(q.shape)


def _per_group(visible: jax.Array, groups: int) -> jax.Array:
    """`[P, T, S] -> [P, 1, T * G, S]`."""
    return jnp.repeat(visible, groups, axis=1)[:, None]


def _attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, *, keys_left: bool
) -> jax.Array:
    """Masked softmax attention: q `[N, KV, R, Dh]`, keys and values `[N, KV, S, Dh]`, visible `[N, 1, R|1, S]`.

    `keys_left` makes the keys the left operand of the first product, which XLA:CPU does not re-pack: for few rows R.
    """
    count, kv_heads, rows, head_dim = q.shape
    blocks = keys.shape[2] // KEY_BLOCK  # J
    by_block = (count, kv_heads, blocks, KEY_BLOCK, head_dim)
    queries = jnp.broadcast_to(q[:, :, None].astype(keys.dtype), (count, kv_heads, blocks, rows, head_dim))
    keys = keys.reshape(by_block)
    if keys_left:
        scores = lax.optimization_barrier(_product(keys, queries, 4)).swapaxes(3, 4)
    else:
        scores = _product(queries, keys, 4)
    scores = scores * (head_dim**-0.5)  # [N, KV, J, R, block]
    seen = visible.reshape(count, 1, -1, blocks, KEY_BLOCK).swapaxes(2, 3)  # [N, 1, J, R|1, block]
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=(2, 4), keepdims=True))
    weighted = _product(weights.astype(values.dtype), values.reshape(by_block), 3)  # [N, KV, J, R, Dh]
    return _in_order(weighted) / _in_order(sum_last(weights))


def _in_order(parts: jax.Array) -> jax.Array:
    """Sum `parts [N, KV, J, ...]` over J from the first block to the last."""
    total = parts[:, :, 0]
    for block in range(1, parts.shape[2]):
        total = total + parts[:, :, block]
    return total


def _product(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    """Contract left's last axis with `right_axis` of right; the three leading axes are batch; float32 out."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((4,), (right_axis,)), ((0, 1, 2), (0, 1, 2))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _scatter(cache: jax.Array, new: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Set `cache[slot, :, position]` to `new [..., KV, Dh]`; positions beyond the cache are dropped."""
    return cache.at[slot, :, position].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
