"""Attention backend `native`: one C++ call per layer on XLA:CPU (`attention.h`).

It rotates, writes and attends in place and reads each row's own keys and nothing behind them. There are no key buckets
and no masks, and prefill and decode run the same code for a query: their bits agree by construction.

The library is built and registered outside (`xla_engine.runner.native_library.build`); a graph only names its target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.attention.backend import (
    AttentionCall,
    LayerCache,
    check_length,
    kept_positions,
    read_positions,
    write_positions,
)
from xla_engine.graphs.config import KEY_SPAN, ModelConfig
from xla_engine.graphs.row_state.rows import Extents

TARGET, REACHING = "xla_engine_attend", "xla_engine_attend_reaching"
ZEROS = "xla_engine_zeros"
KINDS = ("bf16", "f32", "int8")  # of keys and values
_LANES = 16  # keys, and dimensions, side by side in a tile


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """See `graphs.attention.backend.Attention`; the layout of the cache is described in `attention_cache.h`.

    isa: the instruction set of the library. call_positions: see `kept_positions`.
    cache_dtype: None stores keys and values as computed; int8, of a model in bfloat16, in eight bits, with a float32
        scale for each position and head (`attention_bytes.h`).
    """

    isa: str
    call_positions: int | None = None
    cache_dtype: jnp.dtype | None = None
    name = "native"
    bounded_by_length = True
    shares_stores = True

    def make_store(
        self, config: ModelConfig, layers: Sequence[int], rows: int, length: int, dtype: jnp.dtype
    ) -> LayerCache:
        dtype = self.cache_dtype or dtype
        sizes = config.layer(layers[0])
        pack, width = _pack(dtype), _width(sizes.head_dim, dtype)
        check_length(length, least=_LANES * pack)
        heads = (len(layers), rows, sizes.num_key_value_heads)
        kept = kept_positions(config.attention(layers[0]), length, self.call_positions)
        keys = (*heads, kept // _LANES, width // pack + _scales(dtype), _LANES, pack)
        valued = heads if config.latent is None else (*heads[:2], 0)
        values = (*valued, kept // (_LANES * pack), width // _LANES, _LANES, _LANES, pack)
        return LayerCache(
            *(
                self._zeros(shape, dtype) if 0 not in shape else jnp.zeros(shape, dtype)
                for shape in (keys, values)
            )
        )

    def _zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Zeros that take no memory before they are written (`zeros.h`)."""
        made: jax.Array = jax.ffi.ffi_call(
            f"{ZEROS}_{_kind(dtype)}_{self.isa}", jax.ShapeDtypeStruct(shape, dtype)
        )()
        return made

    def clear_values(self, layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
        return layer  # stale values are never read

    def attend_decode(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, *, length: jax.Array, live: jax.Array
    ) -> tuple[LayerCache, jax.Array]:
        slot = jnp.arange(length.shape[0], dtype=jnp.int32)
        return self._attend(layer, qkv, call.rope, call, Extents(slot, length, live.astype(jnp.int32)))

    def attend_prefill(
        self, layer: LayerCache, qkv: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        return self._attend(layer, qkv, call.rope.reshape(-1, *call.rope.shape[2:]), call, lanes)

    def read_span(self, layer: LayerCache, slot: jax.Array, span: jax.Array) -> LayerCache:
        keys, values, own = self._tiles(layer, span)
        return LayerCache(
            read_positions(layer.keys, slot, own * keys, keys, axis=1),
            read_positions(layer.values, slot, own * values, values, axis=1),
        )

    def write_span(
        self, layer: LayerCache, slot: jax.Array, span: jax.Array, moved: LayerCache, length: jax.Array
    ) -> LayerCache:
        keys, values, own = self._tiles(layer, span)
        return LayerCache(
            write_positions(layer.keys, slot, own * keys, moved.keys, axis=1),
            write_positions(layer.values, slot, own * values, moved.values, axis=1),
        )

    def _tiles(self, layer: LayerCache, span: jax.Array) -> tuple[int, int, jax.Array]:
        """Tiles of keys and of values in a span, and where a span lies: rings go round."""
        tiles = layer.keys.shape[3]
        keys = min(KEY_SPAN // _LANES, tiles)
        return keys, keys // _pack(layer.keys.dtype), span % (tiles // keys)

    def _attend(
        self, layer: LayerCache, qkv: jax.Array, rope: jax.Array, call: AttentionCall, lanes: Extents
    ) -> tuple[LayerCache, jax.Array]:
        """The operation on a layer; `rope [N, 2, Dh/2]`."""
        slots, kv_heads, head_dim = *layer.keys.shape[1:3], 2 * rope.shape[-1]
        rows, form, tables = np.arange(slots, dtype=np.int32), call.form, call.block_tables
        features = qkv.size // rope.shape[0] - form.stored_parts * kv_heads * head_dim
        target, reach = (TARGET, ()) if call.reach is None else (REACHING, (call.reach,))
        operation = jax.ffi.ffi_call(
            f"{target}_{_kind(layer.keys.dtype)}_{self.isa}",
            (
                jax.ShapeDtypeStruct((rope.shape[0], features), _result(layer.keys.dtype)),
                *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layer),
            ),
            input_output_aliases={10 + len(reach): 1, 11 + len(reach): 2},
        )
        out, keys, values = operation(
            qkv,
            rope,
            *lanes,
            *reach,
            rows[:, None] if tables is None else tables,  # a slot is a page of its own
            *(np.zeros(0, np.float32) if each is None else each for each in call.weights),
            *layer,
            layer=np.int64(call.layer_in_store),
            window=np.int64(form.window or 0),
            scale=np.float32(form.scale),
            softcap=np.float32(form.softcap or 0),
            eps=np.float32(form.norm_eps),
            stored_parts=np.int64(form.stored_parts),
            value_norm=np.bool_(form.value_norm),
            norm_last=np.bool_(form.norm_last),
        )
        return LayerCache(keys, values), out


def floats(layer: LayerCache) -> list[np.ndarray]:
    """The floats in a layer on the host: keys and values, or their scales if they are in eight bits."""
    keys, values = map(np.asarray, layer)
    if keys.dtype == np.int8:
        return [np.ascontiguousarray(keys[..., -_scales(keys.dtype) :, :, :]).view(np.float32)]
    return [keys.astype(np.float32), values.astype(np.float32)]


def _kind(dtype: jnp.dtype) -> str:
    return {"bfloat16": "bf16", "float32": "f32"}.get(jnp.dtype(dtype).name, "int8")


def _pack(dtype: jnp.dtype) -> int:
    """Elements in 32 bits."""
    return 4 // jnp.dtype(dtype).itemsize


def _scales(dtype: jnp.dtype) -> int:
    """Vectors of scales behind sixteen keys: of the keys, and of the values of the same positions."""
    return 2 if dtype == jnp.int8 else 0


def _result(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.int8 else dtype


def _width(head_dim: int, dtype: jnp.dtype) -> int:
    """Head dimension padded to whole tiles, which are as wide as those of AMX in bfloat16 alone."""
    whole = 2 * _LANES if dtype == jnp.bfloat16 else _LANES
    return -(-head_dim // whole) * whole
