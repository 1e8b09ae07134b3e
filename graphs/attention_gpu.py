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
    check_length,
    read_positions,
    write_positions,
)
from graphs.config import AttentionForm, ModelConfig
from graphs.layers import apply_rope, norm_heads, split_heads

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
        check_length(length)
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
        block_tables: jax.Array | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        position = jnp.where(live, length, -1).astype(jnp.int32)
        by_head = qkv.reshape(len(qkv), -1, layer.keys.shape[3])
        layer, q = self._write(layer, by_head, rope, position, form, weights, block_tables)
        parts = self._partial(layer, q, position, form, block_tables)
        out = self._combine(*parts, position, form, weights.sinks, compute_dtype)
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
        block_tables: jax.Array | None = None,
    ) -> tuple[LayerCache, jax.Array]:
        lanes, width = rope.shape[:2]
        rows, kv_heads, size, head_dim = layer.keys.shape
        by_row = split_heads(qkv, kv_heads, head_dim)
        q, k, v = (x.reshape(lanes, width, -1, head_dim) for x in by_row)
        offset = jnp.arange(width, dtype=jnp.int32)
        q, k = (norm_heads(x, form, own) for x, own in ((q, weights.q_norm), (k, weights.k_norm)))
        position = start[:, None] + offset
        row = slot[:, None] if block_tables is None else block_tables[slot[:, None], position // size]
        # Padding goes out of bounds; indices stay unique as the scatter promises.
        lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
        row = jnp.where(offset < count[:, None], row, rows + lane * width + offset)
        at = (row, slice(None), position % size)
        layer = LayerCache(
            *(
                cache.at[at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)
                for cache, new in zip(layer, (apply_rope(k, rope), v), strict=True)
            )
        )
        tile = min(QUERY_TILE, _whole_tile(width))
        out = self._call(
            functools.partial(_prefill_kernel, tile=tile, form=form),
            grid=(lanes, q.shape[2], -(-width // tile)),
            out_shape=jax.ShapeDtypeStruct(q.shape, compute_dtype),
            warps=4,
        )(
            slot,
            start,
            count,
            apply_rope(q, rope).astype(layer.keys.dtype),
            *layer,
            block_tables,
            weights.sinks,
        )
        return layer, out.reshape(lanes * width, -1)

    def read_block(self, layer: LayerCache, slot: jax.Array, block: jax.Array) -> LayerCache:
        return LayerCache(*(read_positions(leaf, slot, block * KEY_BLOCK, KEY_BLOCK) for leaf in layer))

    def write_block(
        self, layer: LayerCache, slot: jax.Array, block: jax.Array, moved: LayerCache, length: jax.Array
    ) -> LayerCache:
        return LayerCache(
            *(
                write_positions(leaf, slot, block * KEY_BLOCK, new)
                for leaf, new in zip(layer, moved, strict=True)
            )
        )

    def to_host(self, layer: LayerCache, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(layer.keys), np.asarray(layer.values)

    def from_host(self, keys: np.ndarray, values: np.ndarray) -> LayerCache:
        return LayerCache(jax.device_put(keys), jax.device_put(values))

    # -- the kernels of a decode step -------------------------------------------------------------------------

    def _write(
        self,
        layer: LayerCache,
        qkv: jax.Array,
        rope: jax.Array,
        position: jax.Array,
        form: AttentionForm,
        weights: AttentionWeights,
        block_tables: jax.Array | None,
    ) -> tuple[LayerCache, jax.Array]:
        """Write k normed and rotated and v of `qkv [B, H + 2 KV, Dh]` at `position [B]`, unless negative.

        Returns the cache and q normed and rotated, `[B, KV, G, Dh]` in the cache's dtype.
        """
        rows, (_, kv_heads, _, head_dim) = len(qkv), layer.keys.shape
        groups = qkv.shape[1] // kv_heads - 2
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in layer]
        keys, values, q = self._call(
            functools.partial(_write_kernel, eps=form.norm_eps),
            grid=(rows,),
            out_shape=(
                *shapes,
                jax.ShapeDtypeStruct((rows, kv_heads, groups, head_dim), layer.keys.dtype),
            ),
            aliases={3: 0, 4: 1},
            warps=4,
        )(position, qkv, rope, *layer, block_tables, weights.q_norm, weights.k_norm)
        return LayerCache(keys, values), q

    def _partial(
        self,
        layer: LayerCache,
        q: jax.Array,
        position: jax.Array,
        form: AttentionForm,
        block_tables: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Per split of keys the weighted values `[B, KV, J, G, Dh]`, the largest score and the sum of weights
        `[B, KV, J, G]`; splits without a key that the row sees are left as they were."""
        rows, kv_heads, groups, head_dim = q.shape
        pages = 1 if block_tables is None else block_tables.shape[1]
        splits = -(-pages * layer.keys.shape[2] // KEY_BLOCK)
        state = jax.ShapeDtypeStruct((rows, kv_heads, splits, groups), jnp.float32)
        return self._call(
            functools.partial(_split_kernel, form=form),
            grid=(rows, kv_heads, splits),
            out_shape=(jax.ShapeDtypeStruct((*state.shape, head_dim), jnp.float32), state, state),
            warps=4,
        )(position, q, *layer, block_tables)

    def _combine(
        self,
        parts: jax.Array,
        peak: jax.Array,
        total: jax.Array,
        position: jax.Array,
        form: AttentionForm,
        sinks: jax.Array | None,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """Splits from the first to the last that the row sees: `[B, KV, G, Dh]`."""
        rows, kv_heads, _, groups, head_dim = parts.shape
        return self._call(
            functools.partial(_combine_kernel, window=form.window),
            grid=(rows, kv_heads),
            out_shape=jax.ShapeDtypeStruct((rows, kv_heads, groups, head_dim), dtype),
            warps=2,
        )(position, parts, peak, total, sinks)

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
    tables_ref: Ref | None,  # [B, pages]
    q_norm_ref: Ref | None,  # [Dh]
    k_norm_ref: Ref | None,
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    q_ref: Ref,  # [B, KV, G, Dh]
    *,
    eps: float,
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

    def normed(norm_ref: Ref | None, parts: list[jax.Array]) -> list[jax.Array]:
        if norm_ref is None:
            return parts
        square = sum(jnp.sum(part * part, axis=1, keepdims=True) for part in parts)
        scale = lax.rsqrt(square / (2 * half) + eps)
        weights = [_load(norm_ref, (part * half + column,), column < half) for part in range(2)]
        return [part * scale * weight for part, weight in zip(parts, weights, strict=True)]

    def rotate(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first * cos - second * sin, second * cos + first * sin

    head = jnp.arange(_power_of_two(heads))[:, None]
    inside = (head < heads) & (column < half)
    for part, values in enumerate(rotate(*normed(q_norm_ref, halves(0, head, inside)))):
        _store(q_ref, (row, head // groups, head % groups, part * half + column), values, inside)

    @pl.when(position >= 0)
    def _() -> None:
        head = jnp.arange(_power_of_two(kv_heads))[:, None]
        inside = (head < kv_heads) & (column < half)
        new_keys = rotate(*normed(k_norm_ref, halves(heads, head, inside)))
        new_values = halves(heads + kv_heads, head, inside)
        page, offset = _place(tables_ref, row, position, keys_ref.shape[2])
        for part in range(2):
            at = (page, head, offset, part * half + column)
            _store(keys_ref, at, new_keys[part], inside)
            _store(values_ref, at, new_values[part], inside)


def _split_kernel(
    position_ref: Ref,  # [B]
    q_ref: Ref,  # [B, KV, G, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    tables_ref: Ref | None,  # [B, pages]
    parts_ref: Ref,  # [B, KV, J, G, Dh] float32
    peak_ref: Ref,  # [B, KV, J, G] float32
    total_ref: Ref,
    *,
    form: AttentionForm,
) -> None:
    row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    groups, head_dim = q_ref.shape[2:]
    position = position_ref[row]
    first = split * KEY_BLOCK
    lowest = _lowest(position, form.window)

    @pl.when((first <= position) & (lowest < first + KEY_BLOCK))
    def _() -> None:
        group, column = jnp.arange(_whole_tile(groups)), jnp.arange(_power_of_two(head_dim))
        inside = (group[:, None] < groups) & (column[None] < head_dim)
        q = _load(q_ref, (row, kv_head, group[:, None], column[None]), inside)
        peak, total, weighted = _attend(
            q,
            functools.partial(_load_tile, keys_ref, tables_ref, row, kv_head),
            functools.partial(_load_tile, values_ref, tables_ref, row, kv_head),
            form=form,
            position=jnp.broadcast_to(position, group.shape),
            tiles=(
                jnp.maximum(lowest, first) // KEY_TILE,
                pl.cdiv(jnp.minimum(position + 1, first + KEY_BLOCK), KEY_TILE),
            ),
        )
        _store(parts_ref, (row, kv_head, split, group[:, None], column[None]), weighted, inside)
        _store(peak_ref, (row, kv_head, split, group), peak, group < groups)
        _store(total_ref, (row, kv_head, split, group), total, group < groups)


def _combine_kernel(
    position_ref: Ref,  # [B]
    parts_ref: Ref,  # [B, KV, J, G, Dh]
    peak_ref: Ref,  # [B, KV, J, G]
    total_ref: Ref,
    sinks_ref: Ref | None,  # [H]
    out_ref: Ref,  # [B, KV, G, Dh]
    *,
    window: int | None,
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

    position = position_ref[row]
    splits = _lowest(position, window) // KEY_BLOCK, pl.cdiv(position + 1, KEY_BLOCK)
    state = lax.fori_loop(*splits, add, _nothing(len(group), len(column)))
    if sinks_ref is not None:
        state = _with_sink(state, _load(sinks_ref, (kv_head * groups + group,), group < groups))
    _store(out_ref, (row, kv_head, group[:, None], column[None]), _divide(state), inside)


def _prefill_kernel(
    slot_ref: Ref,  # [P]
    start_ref: Ref,
    count_ref: Ref,
    q_ref: Ref,  # [P, T, H, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    tables_ref: Ref | None,  # [B, pages]
    sinks_ref: Ref | None,  # [H]
    out_ref: Ref,  # [P, T, H, Dh]
    *,
    tile: int,
    form: AttentionForm,
) -> None:
    lane, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, width, heads, head_dim = q_ref.shape
    kv_head = head // (heads // keys_ref.shape[1])
    slot, start, count = slot_ref[lane], start_ref[lane], count_ref[lane]
    query, column = block * tile + jnp.arange(tile), jnp.arange(_power_of_two(head_dim))
    inside = (query[:, None] < count) & (column[None] < head_dim)
    at = (lane, query[:, None], head, column[None])
    longest = jnp.where(block * tile < count, start + jnp.minimum((block + 1) * tile, count), 0)
    state = _attend(
        _load(q_ref, at, inside),
        functools.partial(_load_tile, keys_ref, tables_ref, slot, kv_head),
        functools.partial(_load_tile, values_ref, tables_ref, slot, kv_head),
        form=form,
        position=start + query,
        tiles=(_lowest(start + block * tile, form.window) // KEY_TILE, pl.cdiv(longest, KEY_TILE)),
    )
    if sinks_ref is not None:
        state = _with_sink(state, jnp.full((tile,), sinks_ref[head]))
    _store(out_ref, at, _divide(state), (query[:, None] < width) & (column[None] < head_dim))


# -- pieces of kernels ------------------------------------------------------------------------------------------

State = tuple[
    jax.Array, jax.Array, jax.Array
]  # largest score [R], sum of weights [R], weighted values [R, Dh]


def _attend(
    q: jax.Array,
    load_keys: Callable[[jax.Array, jax.Array], jax.Array],
    load_values: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    form: AttentionForm,
    position: jax.Array,
    tiles: tuple[Any, Any],
) -> State:
    """Online softmax of `q [R, Dh]` at `position [R]` over tiles of keys from `tiles[0]` up to `tiles[1]`, in order.

    The loaders take key indices `[tile]` and which of them to load.
    """

    def add(tile: jax.Array, state: State) -> State:
        peak, total, weighted = state
        key = tile * KEY_TILE + jnp.arange(KEY_TILE)
        visible = key[None] <= position[:, None]  # [R, tile]
        if form.window is not None:
            visible &= key[None] > position[:, None] - form.window
        any_query = key <= jnp.max(position)
        scores = _product(q, load_keys(key, any_query).T) * form.scale
        if form.softcap is not None:
            scores = form.softcap * jnp.tanh(scores / form.softcap)
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.maximum(peak, jnp.max(scores, axis=1))
        base = highest  # without a window the first tile holds a key that every query sees
        if form.window is not None:
            base = jnp.where(highest > -jnp.inf, highest, 0.0)
        before, weights = jnp.exp(peak - base), jnp.exp(scores - base[:, None])
        values = load_values(key, any_query)
        return (
            highest,
            total * before + jnp.sum(weights, axis=1),
            weighted * before[:, None] + _product(weights.astype(values.dtype), values),
        )

    return lax.fori_loop(*tiles, add, _nothing(*q.shape))


def _lowest(position: jax.Array, window: int | None) -> Any:
    """The first key that a query at `position` sees."""
    return 0 if window is None else jnp.maximum(position + 1 - window, 0)


def _with_sink(state: State, sink: jax.Array) -> State:
    """One more logit per row, without a value: `sink [R]`."""
    peak, total, weighted = state
    highest = jnp.maximum(peak, sink)
    scale = jnp.exp(peak - highest)
    return highest, total * scale + jnp.exp(sink - highest), weighted * scale[:, None]


def _nothing(rows: int, columns: int) -> State:
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )


def _divide(state: State) -> jax.Array:
    """Weighted mean `[R, Dh]`; zero where nothing was attended to."""
    _, total, weighted = state
    return weighted / jnp.where(total > 0, total, 1.0)[:, None]


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def _load_tile(
    ref: Ref, tables_ref: Ref | None, slot: jax.Array, kv_head: jax.Array, key: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Keys or values `[tile, Dh]` of a cache `[B, KV, S, Dh]`, zero where not wanted."""
    size, head_dim = ref.shape[2:]
    column = jnp.arange(_power_of_two(head_dim))[None]
    inside = wanted[:, None] & (column < head_dim)
    page, offset = _place(tables_ref, slot, key[:, None], size, wanted[:, None])
    return _load(ref, (page, kv_head, offset, column), inside)


def _place(
    tables_ref: Ref | None, slot: jax.Array, position: jax.Array, size: int, wanted: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Page, and position in it, of a position of a slot. Without tables a slot is a page of its own."""
    if tables_ref is None:
        return slot, position
    if wanted is None:
        return tables_ref[slot, position // size], position % size
    return _load_index(tables_ref, (slot, position // size), wanted), position % size


def _load_index(ref: Ref, at: tuple[Any, ...], mask: jax.Array) -> jax.Array:
    return plgpu.load(ref.at[at], mask=mask, other=0)


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
