"""Compiles attention's kernel for a TPU topology: `python -m tests.support.tpu_kernels TOPOLOGY some|all`."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from xla_engine.environment import prepare_to_compile_ahead


class Shape(NamedTuple):
    """heads: queries, key/value heads, size. tokens: of each of two lanes; None: a decode step of eight rows."""

    heads: tuple[int, int, int]
    tokens: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    block_size: int | None = None
    reach: bool = False


SOME = [
    Shape((32, 8, 128)),  # Llama 3.1
    Shape((64, 8, 64), tokens=64, window=128, sinks=True, block_size=16),  # gpt-oss
]
OTHERS = [
    Shape((14, 2, 64), tokens=128),  # Qwen2.5 0.5B
    Shape((8, 4, 256), softcap=50.0, window=4096, block_size=64),  # Gemma 2
    Shape((8, 4, 256), tokens=512, window=512, reach=True),  # Gemma 3, with pictures
    Shape((32, 32, 96), tokens=64),  # Phi-3
    Shape((9, 3, 64), dtype="float32", block_size=256),  # SmolLM2
]
POSITIONS = 4096


def compile_for(topology: str, shape: Shape) -> None:
    """Raise what the compiler raises, or AssertionError unless the cache is updated in place."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from xla_engine.graphs import target
    from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
    from xla_engine.graphs.attention.tpu import TpuAttention
    from xla_engine.graphs.forms import AttentionForm
    from xla_engine.graphs.row_state.rows import Extents
    from xla_engine.runner.ahead_of_time import devices_of

    devices, dtype = devices_of(topology), jnp.dtype(shape.dtype)
    here = SingleDeviceSharding(devices[0])
    heads, kv_heads, size = shape.heads
    slots, lanes = 8, 8 if shape.tokens is None else 2
    tokens = shape.tokens or 1

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=here)

    block = shape.block_size or POSITIONS
    store = array(slots * POSITIONS // block, kv_heads, block, size, dtype=dtype)
    form = AttentionForm(scale=size**-0.5, window=shape.window, softcap=shape.softcap, norm_eps=1e-6)

    def run(layer: Any, qkv: Any, rope: Any, sinks: Any, tables: Any, extents: Any, reach: Any) -> Any:
        call = AttentionCall(form, AttentionWeights(sinks=sinks), rope, POSITIONS, dtype, tables, reach=reach)
        if shape.tokens is None:
            _, start, count = extents
            call = call._replace(rope=rope[:, 0])
            return TpuAttention().attend_decode(layer, qkv, call, length=start, live=count > 0)
        return TpuAttention().attend_prefill(layer, qkv, call, extents)

    arguments = (
        LayerCache(store, store),
        array(lanes * tokens, (heads + 2 * kv_heads) * size, dtype=jnp.float32),
        array(lanes, tokens, 2, size // 2, dtype=jnp.float32),
        array(heads, dtype=jnp.float32) if shape.sinks else None,
        array(slots, POSITIONS // block) if shape.block_size else None,
        Extents(array(lanes), array(lanes), array(lanes)),
        array(lanes, tokens) if shape.reach else None,
    )
    with target.made_for(devices):
        made = jax.jit(run, donate_argnums=0).lower(*arguments).compile()
    cache = 2 * slots * POSITIONS * kv_heads * size * dtype.itemsize
    assert made.memory_analysis().alias_size_in_bytes >= cache, shape


if __name__ == "__main__":
    prepare_to_compile_ahead()
    for each in SOME if sys.argv[2] == "some" else SOME + OTHERS:
        compile_for(sys.argv[1], each)
