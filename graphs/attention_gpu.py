"""Attention backend `gpu`: Pallas kernels for CUDA, lowered through Triton.

One K and one V buffer per layer, `[B, KV, S, Dh]`, donated and written in place. Decode is three kernels: rotate and
write; partial softmax over splits of `KEY_BLOCK` keys, one program per (row, key/value head, split); combine. It is
flash-decoding (Dao et al. 2023) with a split of fixed size instead of a fixed number of splits. Prefill is one
program per (lane, head, block of queries), an online softmax over tiles of keys (FlashAttention-2, Dao 2023).

Law 1 by construction: a program reads one row, tiles have one size, and tiles and splits are taken in order up to the
row's own length, so that neither the other rows nor the cache's length can change a bit. Keys a query must not see
are neither scored nor, if values, loaded: stale NaN is harmless without being cleared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from graphs.attention import (
    KEY_BLOCK,
    AttentionWeights,
    KVCache,
    LayerCache,
    is_plain,
    whole_blocks,
)
from graphs.config import AttentionForm, ModelConfig
from graphs.layers import apply_rope, split_heads

KEY_TILE = 64  # keys per step of a program; divides KEY_BLOCK
QUERY_TILE = 64  # queries per program in prefill
_LEAST_ROWS = 16  # of a tensor core product

Ref = Any  # a Pallas reference: an array in device memory inside a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttention:
    """See `graphs.attention.Attention`. `interpret` runs the kernels as plain JAX, anywhere and slowly."""

    interpret: bool = False
    name = "gpu"
    bounded_by_length = True

    def make_cache(self, config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
        assert length == whole_blocks(length), length
        shape = (rows, config.num_key_value_heads, length, config.head_dim)
        return [
            LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(config.num_hidden_layers)
        ]

    def clear_values(self, layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
        return layer

    def attend_decode(
        self,
        layer: LayerCache,
        qkv: jax.Array,
        *,
        form: AttentionForm,
        weights: AttentionWeights,
        rope: jax.Array,
        length: jax.Array,
        live: jax.Array,
        key_length: int,
        compute_dtype: jnp.dtype,
    ) -> tuple[LayerCache, jax.Array]:
        assert is_plain(form, weights, 2 * rope.shape[-1]), form
        position = jnp.where(live, length, -1).astype(jnp.int32)
        layer, q = self._write(layer, qkv.reshape(len(qkv), -1, layer.keys.shape[3]), rope, position)
        out = self._combine(*self._partial(layer, q, position), position, compute_dtype)
        return layer, out.reshape(len(qkv), -1)

    def attend_prefill(
        self,
        layer: LayerCache,
        qkv: jax.Array,
        *,
        form: AttentionForm,
        weights: AttentionWeights,
        rope: jax.Array,
        slot: jax.Array,
        start: jax.Array,
        count: jax.Array,
        key_length: int,
        compute_dtype: jnp.dtype,
    ) -> tuple[LayerCache, jax.Array]:
        assert is_plain(form, weights, 2 * rope.shape[-1]), form
        lanes, width = rope.shape[:2]
        _, kv_heads, positions, head_dim = layer.keys.shape
        by_row = split_heads(qkv, kv_heads, head_dim)
        q, k, v = (x.reshape(lanes, width, -1, head_dim) for x in by_row)
        offset = jnp.arange(width, dtype=jnp.int32)
        # Padding goes out of bounds; indices stay unique as the scatter promises.
        lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
        beyond = positions + lane * width + offset
        at = (slot[:, None], slice(None), jnp.where(offset < count[:, None], start[:, None] + offset, beyond))
        layer = LayerCache(
            *(
                cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
                for cache, new in zip(layer, (apply_rope(k, rope), v), strict=True)
            )
        )
        tile = min(QUERY_TILE, _whole_tile(width))
        out = self._call(
            functools.partial(_prefill_kernel, tile=tile),
            grid=(lanes, q.shape[2], -(-width // tile)),
            out_shape=jax.ShapeDtypeStruct(q.shape, compute_dtype),
            warps=4,
        )(slot, start, count, apply_rope(q, rope).astype(layer.keys.dtype), *layer)
        return layer, out.reshape(lanes * width, -1)

    def to_host(self, layer: LayerCache, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(layer.keys), np.asarray(layer.values)

    def from_host(self, keys: np.ndarray, values: np.ndarray) -> LayerCache:
        return LayerCache(jax.device_put(keys), jax.device_put(values))

    # -- the kernels of a decode step -------------------------------------------------------------------------

    def _write(
        self, layer: LayerCache, qkv: jax.Array, rope: jax.Array, position: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        """Write k rotated and v of `qkv [B, H + 2 KV, Dh]` at `position [B]`, unless negative.

        Returns the cache and q rotated, `[B, KV, G, Dh]` in the cache's dtype.
        """
        rows, kv_heads, _, head_dim = layer.keys.shape
        groups = qkv.shape[1] // kv_heads - 2
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in layer]
        keys, values, q = self._call(
            _write_kernel,
            grid=(rows,),
            out_shape=(
                *shapes,
                jax.ShapeDtypeStruct((rows, kv_heads, groups, head_dim), layer.keys.dtype),
            ),
            aliases={3: 0, 4: 1},
            warps=4,
        )(position, qkv, rope, *layer)
        return LayerCache(keys, values), q

    def _partial(
        self, layer: LayerCache, q: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Per split of keys the weighted values `[B, KV, J, G, Dh]`, the largest score and the sum of weights
        `[B, KV, J, G]`; splits behind a row's own keys are left as they were."""
        rows, kv_heads, positions, head_dim = layer.keys.shape
        splits, groups = positions // KEY_BLOCK, q.shape[2]
        state = jax.ShapeDtypeStruct((rows, kv_heads, splits, groups), jnp.float32)
        return self._call(
            _split_kernel,
            grid=(rows, kv_heads, splits),
            out_shape=(jax.ShapeDtypeStruct((*state.shape, head_dim), jnp.float32), state, state),
            warps=4,
        )(position, q, *layer)

    def _combine(
        self, parts: jax.Array, peak: jax.Array, total: jax.Array, position: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Splits from the first to the row's last: `[B, KV, G, Dh]`."""
        rows, kv_heads, _, groups, head_dim = parts.shape
        return self._call(
            _combine_kernel,
            grid=(rows, kv_heads),
            out_shape=jax.ShapeDtypeStruct((rows, kv_heads, groups, head_dim), dtype),
            warps=2,
        )(position, parts, peak, total)

    def _call(
        self,
        kernel: Callable[..., None],
        *,
        grid: tuple[int, ...],
        out_shape: Any,
        warps: int,
        aliases: dict[int, int] | None = None,
    ) -> Callable[..., Any]:
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=out_shape,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=3),
            interpret=self.interpret,
            name=getattr(kernel, "func", kernel).__name__.strip("_"),
        )


def _write_kernel(
    position_ref: Ref,  # [B]
    qkv_ref: Ref,  # [B, H + 2 KV, Dh] float32
    rope_ref: Ref,  # [B, 2, Dh/2]
    _keys_in: Ref,  # the outputs' own memory
    _values_in: Ref,
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    q_ref: Ref,  # [B, KV, G, Dh]
) -> None:
    row = pl.program_id(0)
    kv_heads, groups = q_ref.shape[1:3]
    heads, half = kv_heads * groups, qkv_ref.shape[2] // 2
    position = position_ref[row]
    column = jnp.arange(_power_of_two(half))[None]
    cos = _load(rope_ref, (row, 0, column), column < half)
    sin = _load(rope_ref, (row, 1, column), column < half)

    def halves(first_head: int, head: jax.Array, inside: jax.Array) -> list[jax.Array]:
        return [_load(qkv_ref, (row, first_head + head, part * half + column), inside) for part in range(2)]

    def rotate(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first * cos - second * sin, second * cos + first * sin

    head = jnp.arange(_power_of_two(heads))[:, None]
    inside = (head < heads) & (column < half)
    for part, values in enumerate(rotate(*halves(0, head, inside))):
        _store(q_ref, (row, head // groups, head % groups, part * half + column), values, inside)

    @pl.when(position >= 0)
    def _() -> None:
        head = jnp.arange(_power_of_two(kv_heads))[:, None]
        inside = (head < kv_heads) & (column < half)
        new_keys, new_values = rotate(*halves(heads, head, inside)), halves(heads + kv_heads, head, inside)
        for part in range(2):
            at = (row, head, position, part * half + column)
            _store(keys_ref, at, new_keys[part], inside)
            _store(values_ref, at, new_values[part], inside)


def _split_kernel(
    position_ref: Ref,  # [B]
    q_ref: Ref,  # [B, KV, G, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    parts_ref: Ref,  # [B, KV, J, G, Dh] float32
    peak_ref: Ref,  # [B, KV, J, G] float32
    total_ref: Ref,
) -> None:
    row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    groups, head_dim = q_ref.shape[2:]
    position = position_ref[row]
    first = split * KEY_BLOCK

    @pl.when(first <= position)
    def _() -> None:
        group, column = jnp.arange(_whole_tile(groups)), jnp.arange(_power_of_two(head_dim))
        inside = (group[:, None] < groups) & (column[None] < head_dim)
        q = _load(q_ref, (row, kv_head, group[:, None], column[None]), inside)
        peak, total, weighted = _attend(
            q,
            functools.partial(_load_tile, keys_ref, row, kv_head),
            functools.partial(_load_tile, values_ref, row, kv_head),
            position=jnp.broadcast_to(position, group.shape),
            first=first,
            tiles=pl.cdiv(jnp.minimum(position + 1 - first, KEY_BLOCK), KEY_TILE),
            scale=head_dim**-0.5,
        )
        _store(parts_ref, (row, kv_head, split, group[:, None], column[None]), weighted, inside)
        _store(peak_ref, (row, kv_head, split, group), peak, group < groups)
        _store(total_ref, (row, kv_head, split, group), total, group < groups)


def _combine_kernel(
    position_ref: Ref,  # [B]
    parts_ref: Ref,  # [B, KV, J, G, Dh]
    peak_ref: Ref,  # [B, KV, J, G]
    total_ref: Ref,
    out_ref: Ref,  # [B, KV, G, Dh]
) -> None:
    row, kv_head = pl.program_id(0), pl.program_id(1)
    groups, head_dim = out_ref.shape[2:]
    group, column = jnp.arange(_power_of_two(groups)), jnp.arange(_power_of_two(head_dim))
    inside = (group[:, None] < groups) & (column[None] < head_dim)

    def add(split: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        peak, total, weighted = state
        its_peak = _load(peak_ref, (row, kv_head, split, group), group < groups)
        its_total = _load(total_ref, (row, kv_head, split, group), group < groups)
        part = _load(parts_ref, (row, kv_head, split, group[:, None], column[None]), inside)
        highest = jnp.maximum(peak, its_peak)
        before, now = jnp.exp(peak - highest), jnp.exp(its_peak - highest)
        return (
            highest,
            total * before + its_total * now,
            weighted * before[:, None] + part * now[:, None],
        )

    splits = pl.cdiv(position_ref[row] + 1, KEY_BLOCK)
    _, total, weighted = lax.fori_loop(0, splits, add, _nothing(len(group), len(column)))
    _store(out_ref, (row, kv_head, group[:, None], column[None]), _divide(weighted, total), inside)


def _prefill_kernel(
    slot_ref: Ref,  # [P]
    start_ref: Ref,
    count_ref: Ref,
    q_ref: Ref,  # [P, T, H, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    out_ref: Ref,  # [P, T, H, Dh]
    *,
    tile: int,
) -> None:
    lane, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, width, heads, head_dim = q_ref.shape
    kv_head = head // (heads // keys_ref.shape[1])
    slot, start, count = slot_ref[lane], start_ref[lane], count_ref[lane]
    query, column = block * tile + jnp.arange(tile), jnp.arange(_power_of_two(head_dim))
    inside = (query[:, None] < count) & (column[None] < head_dim)
    at = (lane, query[:, None], head, column[None])
    longest = jnp.where(block * tile < count, start + jnp.minimum((block + 1) * tile, count), 0)
    _, total, weighted = _attend(
        _load(q_ref, at, inside),
        functools.partial(_load_tile, keys_ref, slot, kv_head),
        functools.partial(_load_tile, values_ref, slot, kv_head),
        position=start + query,
        first=0,
        tiles=pl.cdiv(longest, KEY_TILE),
        scale=head_dim**-0.5,
    )
    _store(out_ref, at, _divide(weighted, total), (query[:, None] < width) & (column[None] < head_dim))


# -- pieces of kernels ------------------------------------------------------------------------------------------

State = tuple[
    jax.Array, jax.Array, jax.Array
]  # largest score [R], sum of weights [R], weighted values [R, Dh]


def _attend(
    q: jax.Array,
    load_keys: Callable[[jax.Array, jax.Array], jax.Array],
    load_values: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    position: jax.Array,
    first: jax.Array | int,
    tiles: jax.Array,
    scale: float,
) -> State:
    """Online softmax of `q [R, Dh]` at `position [R]` over `tiles` tiles of keys from `first` on, in order.

    The loaders take key indices `[tile]` and which of them to load; the first tile holds a key every query sees.
    """

    def add(tile: jax.Array, state: State) -> State:
        peak, total, weighted = state
        key = first + tile * KEY_TILE + jnp.arange(KEY_TILE)
        visible = key[None] <= position[:, None]  # [R, tile]
        any_query = key <= jnp.max(position)
        scores = _product(q, load_keys(key, any_query).T) * scale
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.maximum(peak, jnp.max(scores, axis=1))
        before, weights = jnp.exp(peak - highest), jnp.exp(scores - highest[:, None])
        values = load_values(key, any_query)
        return (
            highest,
            total * before + jnp.sum(weights, axis=1),
            weighted * before[:, None] + _product(weights.astype(values.dtype), values),
        )

    return lax.fori_loop(0, tiles, add, _nothing(*q.shape))


def _nothing(rows: int, columns: int) -> State:
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )


def _divide(weighted: jax.Array, total: jax.Array) -> jax.Array:
    """Zero where nothing was attended to."""
    return weighted / jnp.where(total > 0, total, 1.0)[:, None]


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def _load_tile(ref: Ref, slot: jax.Array, kv_head: jax.Array, key: jax.Array, wanted: jax.Array) -> jax.Array:
    """Keys or values `[tile, Dh]` of a cache `[B, KV, S, Dh]`, zero where not wanted."""
    head_dim = ref.shape[3]
    column = jnp.arange(_power_of_two(head_dim))[None]
    return _load(ref, (slot, kv_head, key[:, None], column), wanted[:, None] & (column < head_dim))


def _load(ref: Ref, at: tuple[Any, ...], mask: jax.Array) -> jax.Array:
    return plgpu.load(ref.at[at], mask=mask, other=0.0)


def _store(ref: Ref, at: tuple[Any, ...], values: jax.Array, mask: jax.Array) -> None:
    plgpu.store(ref.at[at], values.astype(ref.dtype), mask=mask)


def _power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`: Triton knows no other sizes."""
    return 1 << (size - 1).bit_length()


def _whole_tile(size: int) -> int:
    """Rows of a product that holds `size` rows."""
    return max(_LEAST_ROWS, _power_of_two(size))
