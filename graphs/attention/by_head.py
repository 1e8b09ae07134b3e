"""The cache layout of the Pallas backends: one K and one V buffer per layer, `[B, KV, S, Dh]`.

A slot is one contiguous piece of each head, a block a slot of one span or less. Stale values need no clearing: the
kernels load none behind a row's own keys. Each function is the method of the same name of
`graphs.attention.backend.Attention`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import LayerCache, check_length, read_positions, write_positions
from xla_engine.graphs.config import KEY_SPAN, ModelConfig


def make_store(
    config: ModelConfig, layers: Sequence[int], rows: int, length: int, dtype: jnp.dtype
) -> LayerCache:
    check_length(length)
    sizes = config.layer(layers[0])
    shape = (rows, sizes.num_key_value_heads, length, sizes.head_dim)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def clear_values(layer: LayerCache, slot: jax.Array, fresh: jax.Array) -> LayerCache:
    return layer


def read_span(layer: LayerCache, slot: jax.Array, span: jax.Array) -> LayerCache:
    size = min(KEY_SPAN, layer.keys.shape[2])
    return LayerCache(*(read_positions(leaf, slot, span * size, size) for leaf in layer))


def write_span(
    layer: LayerCache, slot: jax.Array, span: jax.Array, moved: LayerCache, length: jax.Array
) -> LayerCache:
    return LayerCache(
        *(
            write_positions(leaf, slot, span * new.shape[1], new)
            for leaf, new in zip(layer, moved, strict=True)
        )
    )
