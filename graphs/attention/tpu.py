"""Attention backend `tpu`: one ragged kernel in Pallas for decode, verify and prefill, which also writes the slot.

The design is that of Ragged Paged Attention (arXiv 2604.15464): a grid step takes one row of a batch of rows of any
lengths, streams tiles of its keys and values from HBM into two buffers, and sums by FlashAttention's recurrence (Dao
2023), so that a row costs its own keys and no others. Here, slots and tables of blocks are read by the same code.

One K and one V buffer per layer, `[B, KV, S, Dh]`, donated and written in place. A position is written with the rest
of its register tile, which is read before. Norms and rotation are XLA's.

Law 1: a grid step reads one row, tiles have one size and are added in order, up to the row's own length. Keys that a
query must not see get no weight, and values behind the row's last key count as zero, so stale NaN is harmless. Whether
the products of a chip have the same bits for one query as for many is for the self-check to find out there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xla_engine.graphs.attention import by_head
from xla_engine.graphs.attention.backend import AttentionCall, LayerCache
from xla_engine.graphs.attention.tpu_kernel import RaggedSizes, ragged_kernel, register_rows
from xla_engine.graphs.config import KEY_SPAN
from xla_engine.graphs.ops.norms import normed_and_rotated, split_heads
from xla_engine.graphs.row_state.rows import Extents

_PRODUCT_ROWS = 16  # queries of a product are padded to a multiple
_RESULT_BYTES = 1 << 20  # of a lane's result in float32; a longer lane is several
_TILE_BYTES = 1 << 20  # of the keys of a tile, of all heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuAttention:
    """See `graphs.attention.backend.Attention`. interpret: how Pallas interprets the kernel elsewhere; False: not."""

    interpret: Any = False
    name = "tpu"
    isa = None
    bounded_by_length = True
    shares_stores = False
    make_store = staticmethod(by_head.make_store)
    clear_values = staticmethod(by_head.clear_values)
    read_span = staticmethod(by_head.read_span)
    write_span = staticmethod(by_head.write_span)

    def attend_decode(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, *, length: jax.Array, live: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        rows = jnp.arange(len(qkv), dtype=jnp.int32)
        lanes = Extents(rows, length.astype(jnp.int32), live.astype(jnp.int32))
        return self._attend(layer, qkv, call, lanes, call.rope[:, None])

    def attend_prefill(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        return self._attend(layer, qkv, call, lanes, call.rope)

    def _attend(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents, rope: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        """rope: `[P, T, 2, Dh/2]`."""
        number, width = rope.shape[:2]
        kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        stored = call.form.stored_parts
        by_row = split_heads(qkv, kv_heads if stored else 0, head_dim, call.form)
        q, *new = (x.reshape(number, width, -1, head_dim) for x in by_row[: 3 if stored else 1])
        q = normed_and_rotated(q, call.form, call.weights.q_norm, rope)
        if stored:
            new[0] = normed_and_rotated(new[0], call.form, call.weights.k_norm, rope)
        parts = -(-width * q.shape[2] * _padded(head_dim) * 4 // _RESULT_BYTES)
        size = -(-width // parts)  # positions of a part of a lane, which is a lane of its own
        slot, start, count = (
            jnp.repeat(each.astype(jnp.int32), parts).reshape(number, parts) for each in lanes
        )
        before = jnp.arange(parts, dtype=jnp.int32) * size
        lanes = Extents(
            *(each.reshape(-1) for each in (slot, start + before, jnp.clip(count - before, 0, size)))
        )

        def in_parts(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, [(0, 0), (0, parts * size - width), *[(0, 0)] * (x.ndim - 2)])
            return padded.reshape(number * parts, size, *x.shape[2:])

        reach = None if call.reach is None else in_parts(call.reach)
        keys, values, out = _ragged(
            self.interpret, call, layer, lanes, in_parts(q), [in_parts(each) for each in new], reach
        )
        out = out.reshape(number, parts * size, -1)[:, :width].astype(call.compute_dtype)
        return LayerCache(keys, values), out.reshape(number * width, -1)


def _padded(head_dim: int) -> int:
    """Lanes of a head in the core's memory."""
    return -(-head_dim // 128) * 128


def _tile(position_bytes: int) -> int:
    """Keys of a tile, a power of two that divides a span. position_bytes: of the keys of all heads."""
    tile = KEY_SPAN
    while tile > 32 and tile * position_bytes > _TILE_BYTES:
        tile //= 2
    return tile


def _aligned(new: jax.Array, shift: jax.Array, unit: int) -> jax.Array:
    """`new [P, T, KV, Dh]` behind `shift [P]` rows of anything: `[P, KV, W, Dh]`, W a multiple of `unit`."""
    width = new.shape[1]
    rows = -(-(width + unit - 1) // unit) * unit
    source = jnp.clip(jnp.arange(rows, dtype=jnp.int32) - shift[:, None], 0, width - 1)  # [P, W]
    return jnp.take_along_axis(new, source[:, :, None, None], axis=1).swapaxes(1, 2)


def _ragged(
    interpret: Any,
    call: AttentionCall,
    layer: LayerCache,
    lanes: Extents,
    q: jax.Array,
    new: Sequence[jax.Array],
    reach: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the kernel: keys, values and the result `[P, T, H, Dh]` in float32.

    q: `[P, T, H, Dh]`. new: keys and values `[P, T, KV, Dh]`; none if the layer has none of its own. reach: as in
    `AttentionCall`.
    """
    number, width, heads, head_dim = q.shape
    kv_heads, length, dtype = layer.keys.shape[1], layer.keys.shape[2], layer.keys.dtype
    groups, rows = heads // kv_heads, width * heads // kv_heads
    padded = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    unit, tile = register_rows(dtype), _tile(kv_heads * _padded(head_dim) * dtype.itemsize)
    sizes = RaggedSizes(tile=tile, piece=min(length, tile), unit=unit, passes=1 if reach is None else 2)
    offset = jnp.arange(width, dtype=jnp.int32)
    last = lanes.start[:, None] + jnp.minimum(
        offset, lanes.size[:, None] - 1
    )  # behind the last query: its own
    seen = last + 1 if reach is None else jnp.where(offset < lanes.size[:, None], reach, last + 1)

    def by_head(each: jax.Array) -> jax.Array:  # [P, KV, rows, Dh], queries of a key/value head side by side
        each = each.reshape(number, width, kv_heads, groups, head_dim).swapaxes(1, 2)
        each = each.reshape(number, kv_heads, rows, head_dim).astype(dtype)
        return jnp.pad(each, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))

    def by_query(each: jax.Array) -> jax.Array:  # [P, rows, 1]
        spread = jnp.repeat(each, groups, axis=1)
        return jnp.pad(spread, ((0, 0), (0, padded - rows)), mode="edge")[:, :, None]

    tables, weights = call.block_tables, call.weights
    scalars = [*lanes, jnp.max(seen, axis=1), *([] if tables is None else [tables.astype(jnp.int32)])]
    inputs = [by_head(q), by_query(last), by_query(seen)]
    inputs += [_aligned(each.astype(dtype), lanes.start % unit, unit) for each in new]

    def of_lane(each: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((1, *each.shape[1:]), lambda turn, lane, *_: (lane, *[0] * (each.ndim - 1)))

    specs = [of_lane(each) for each in inputs]
    if weights.sinks is not None:
        sinks = jnp.tile(weights.sinks.reshape(kv_heads, -1), (1, width))
        inputs.append(jnp.pad(sinks, ((0, 0), (0, padded - rows)))[:, :, None])
        specs.append(pl.BlockSpec(inputs[-1].shape, lambda turn, lane, *_: (0, 0, 0)))
    result = jax.ShapeDtypeStruct((number, kv_heads, padded, head_dim), jnp.float32)
    # While all lanes write, the result stays at the first lane, which then is the first to attend.
    of_result = pl.BlockSpec(
        (1, *result.shape[1:]), lambda turn, lane, *_: (lane if sizes.passes == 1 else lane * turn, 0, 0, 0)
    )
    anywhere, sums = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((kv_heads, padded, 1), jnp.float32)
    buffers = [pltpu.VMEM((2, kv_heads, tile, head_dim), dtype)] * 2
    scratch = [*buffers, pltpu.SemaphoreType.DMA((2, 2)), sums, sums]
    scratch.append(pltpu.VMEM((kv_heads, padded, head_dim), jnp.float32))
    if new:
        scratch += [pltpu.VMEM(inputs[3].shape[1:], dtype)] * 2 + [pltpu.SemaphoreType.DMA((2,))]
    first = len(scalars) + len(inputs)
    keys, values, out = pl.pallas_call(
        _with_names(sizes, call, writes=bool(new)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(sizes.passes, number),
            in_specs=[*specs, anywhere, anywhere],
            out_specs=[anywhere, anywhere, of_result],
            scratch_shapes=scratch,
        ),
        out_shape=[*(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layer), result],
        input_output_aliases={first: 0, first + 1: 1},
        cost_estimate=_cost(number * call.key_length, kv_heads, rows, head_dim, dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 2),
        interpret=interpret,
        name="ragged_attention",
    )(*scalars, *inputs, *layer)
    out = out[:, :, :rows].reshape(number, kv_heads, width, groups, head_dim).swapaxes(1, 2)
    return keys, values, out.reshape(number, width, heads, head_dim)


def _cost(keys: int, kv_heads: int, rows: int, head_dim: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """What the compiler cannot see: of calls whose lanes have so many keys together, at most."""
    return pl.CostEstimate(
        flops=4 * keys * kv_heads * rows * head_dim,
        bytes_accessed=2 * keys * kv_heads * head_dim * dtype.itemsize,
        transcendentals=keys * kv_heads * rows,
    )


def _with_names(sizes: RaggedSizes, call: AttentionCall, *, writes: bool) -> Any:
    """The kernel, which gets its references by name; those that a call does not have are left out."""
    names = ["slot", "start", "count", "end"]
    names += [] if call.block_tables is None else ["tables"]
    names += ["q", "last", "seen"]
    names += ["new_keys", "new_values"] if writes else []
    names += [] if call.weights.sinks is None else ["sinks"]
    names += ["_", "__", "keys", "values", "out"]  # the store that is given is the one that is written
    names += ["key_tiles", "value_tiles", "arrived", "peak", "total", "weighted"]
    names += ["old_keys", "old_values", "moved"] if writes else []

    def run(*refs: Any) -> None:
        ragged_kernel(dict(zip(names, refs, strict=True)), sizes, call.form)

    return run
