"""Attention backend `gpu`: Pallas kernels for CUDA, lowered through Triton.

One K and one V buffer per layer, `[B, KV, S, Dh]`, donated and written in place. Decode is three kernels: rotate and
write; softmax over splits of the keys, one program per (row, key/value head, split); combine. It is flash-decoding
(Dao et al. 2023) with a split of fixed size instead of a fixed number of splits. Prefill is the first kernel and one
program per (lane, head, tile of queries), which goes through the splits itself (FlashAttention-2, Dao 2023).

The kernels are in `graphs.attention.gpu_kernels`.

Law 1 by construction: a program reads one row, splits have one size and are merged in order up to the row's own
length, so that neither the other rows nor the cache's length can change a bit. Prefill and decode merge the same
splits, scored by the same code with as many warps: their bits agree (findings/gpu.md). Keys a query must not see are
neither scored nor, if values, loaded: stale NaN is harmless without being cleared.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention import by_head
from xla_engine.graphs.attention.backend import AttentionCall, LayerCache
from xla_engine.graphs.attention.gpu_kernels import (
    combine_kernel,
    key_tile,
    prefill_kernel,
    split_kernel,
    whole_tile,
    write_kernel,
)
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.ops.gpu_call import kernel_call
from xla_engine.graphs.ops.norms import split_heads
from xla_engine.graphs.row_state.rows import Extents

QUERY_TILE = 64  # queries per program in prefill
_WARPS = 8  # of the programs that add weights, in decode and in prefill: they have a share of the keys each


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttention:
    """See `graphs.attention.backend.Attention`. `interpret` runs the kernels as plain JAX, anywhere and slowly."""

    interpret: bool = False
    name = "gpu"
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
        return self._decode(
            layer, qkv, jnp.arange(len(qkv), dtype=jnp.int32), jnp.where(live, length, -1), call
        )

    def attend_prefill(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        number, width = call.rope.shape[:2]
        # A decode step of some rows, whose keys are many programs' work.
        if width == 1 and call.reach is None:
            return self._decode(layer, qkv, lanes.slot, jnp.where(lanes.size > 0, lanes.start, -1), call)
        offset = jnp.arange(width, dtype=jnp.int32)
        position = jnp.where(offset < lanes.size[:, None], lanes.start[:, None] + offset, -1)
        token = position.reshape(-1).astype(jnp.int32)
        layer, q = self._write(layer, qkv, jnp.repeat(lanes.slot, width), token, call)
        q = q.reshape(number, width, -1, layer.keys.shape[3])
        tile = min(QUERY_TILE, whole_tile(width))
        out = kernel_call(
            prefill_kernel,
            tile=tile,
            form=call.form,
            interpret=self.interpret,
            grid=(number, q.shape[2], -(-width // tile)),
            out_shape=jax.ShapeDtypeStruct(q.shape, call.compute_dtype),
            warps=_WARPS,
            stages=2,
        )(*lanes, q, *layer, call.block_tables, call.weights.sinks, call.reach)
        return layer, out.reshape(number * width, -1)

    def _decode(
        self, layer: LayerCache, qkv: jax.Array, slot: jax.Array, position: jax.Array, call: AttentionCall
    ) -> tuple[LayerCache, jax.Array]:
        """One token of each `slot [N]`, at `position [N]`; negative: none."""
        position = position.astype(jnp.int32)
        layer, q = self._write(layer, qkv, slot, position, call)
        parts = self._partial(layer, q, slot, position, call)
        out = self._combine(*parts, position, call, key_tile(layer.keys))
        return layer, out.reshape(len(qkv), -1)

    def _write(
        self, layer: LayerCache, qkv: jax.Array, slot: jax.Array, position: jax.Array, call: AttentionCall
    ) -> tuple[LayerCache, jax.Array]:
        """Write k normed and rotated and v of `qkv [N, (H + 2 KV) Dh]` at `position [N]` of `slot [N]`, from 0 on.

        Returns the cache and q normed and rotated, `[N, KV, G, Dh]` in the cache's dtype.
        """
        tokens, (_, kv_heads, _, head_dim) = len(qkv), layer.keys.shape
        by_head = _with_values(qkv, kv_heads, head_dim, call.form)
        position = position if call.form.stored_parts else jnp.full_like(position, -1)
        groups = by_head.shape[1] // kv_heads - 2
        rope = call.rope.reshape(tokens, 2, -1)
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in layer]
        keys, values, q = kernel_call(
            write_kernel,
            eps=call.form.norm_eps,
            norm_last=call.form.norm_last,
            interpret=self.interpret,
            grid=(tokens,),
            out_shape=(*shapes, jax.ShapeDtypeStruct((tokens, kv_heads, groups, head_dim), layer.keys.dtype)),
            aliases=((4, 0), (5, 1)),
            warps=4,
        )(slot, position, by_head, rope, *layer, call.block_tables, call.weights.q_norm, call.weights.k_norm)
        return LayerCache(keys, values), q

    def _partial(
        self, layer: LayerCache, q: jax.Array, slot: jax.Array, position: jax.Array, call: AttentionCall
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Per split of keys the weighted values `[B, KV, J, G, Dh]`, the largest score and the sum of weights
        `[B, KV, J, G]`; splits without a key that the row sees are left as they were."""
        rows, kv_heads, groups, head_dim = q.shape
        blocks = 1 if call.block_tables is None else call.block_tables.shape[1]
        splits = -(-blocks * layer.keys.shape[2] // key_tile(layer.keys))
        state = jax.ShapeDtypeStruct((rows, kv_heads, splits, groups), jnp.float32)
        parts: tuple[jax.Array, jax.Array, jax.Array] = kernel_call(
            split_kernel,
            form=call.form,
            interpret=self.interpret,
            grid=(rows, kv_heads, splits),
            out_shape=(jax.ShapeDtypeStruct((*state.shape, head_dim), jnp.float32), state, state),
            warps=_WARPS,
        )(slot, position, q, *layer, call.block_tables)
        return parts

    def _combine(
        self,
        parts: jax.Array,
        peak: jax.Array,
        total: jax.Array,
        position: jax.Array,
        call: AttentionCall,
        size: int,
    ) -> jax.Array:
        """Splits of `size` keys, from the first to the last that the row sees: `[B, KV, G, Dh]`."""
        rows, kv_heads, _, groups, head_dim = parts.shape
        out: jax.Array = kernel_call(
            combine_kernel,
            size=size,
            window=call.form.window,
            interpret=self.interpret,
            grid=(rows, kv_heads),
            out_shape=jax.ShapeDtypeStruct((rows, kv_heads, groups, head_dim), call.compute_dtype),
            warps=4,
        )(position, parts, peak, total, call.weights.sinks)
        return out


def _with_values(qkv: jax.Array, kv_heads: int, head_dim: int, form: AttentionForm) -> jax.Array:
    """Queries, keys and values as they are written, `[N, H + 2 KV, Dh]`; zeros for those of another layer."""
    if form.stored_parts == 2 and not form.value_norm:
        return qkv.reshape(len(qkv), -1, head_dim)
    q, *others = split_heads(qkv, kv_heads, head_dim, form)
    if not form.stored_parts:
        others = [jnp.zeros((len(qkv), kv_heads, head_dim), qkv.dtype)] * 2
    return jnp.concatenate([q, *others], axis=1)
