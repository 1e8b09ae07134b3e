"""Keys and values of layers as arrays on the host, whatever the backend and its layout, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from xla_engine.graphs.attention.backend import Attention, LayerCache
from xla_engine.graphs.attention.native import _LANES, _pack, _width
from xla_engine.graphs.config import KEY_SPAN
from xla_engine.graphs.kv_cache.cache import KVCache, places, stores
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.recurrent.kind import RecurrentState

Layer = tuple[np.ndarray, np.ndarray]


def to_host(spec: ModelSpec, cache: KVCache) -> list[Layer]:
    """Copies of every layer's state: keys and values `[B, KV, S, Dh]`, or the two arrays of a `RecurrentState`."""
    found, where = [], places(spec)
    for index in range(spec.config.num_hidden_layers):
        if index in where.states:
            kept = cache[where.states[index]]
            assert isinstance(kept, RecurrentState)
            first, second = kept.inputs, kept.memory
        else:
            store, layer_in_store = where.keys[index]
            first, second = layer_to_host(spec.attention, cache[store], spec.config.head_dim, layer_in_store)
        found.append((np.array(first), np.array(second)))
    return found


def from_host(spec: ModelSpec, layers: Sequence[Layer]) -> KVCache:
    """The inverse of `to_host`, bit for bit."""
    cache: KVCache = []
    for members, is_state in stores(spec):
        if is_state:
            cache.append(RecurrentState(*jax.device_put(layers[members[0]])))
            continue
        alone = [layer_from_host(spec.attention, *layers[index]) for index in members]
        joined = (
            jax.device_put(np.concatenate(list(map(np.asarray, leaves))))
            for leaves in zip(*alone, strict=True)
        )
        cache.append(alone[0] if len(alone) == 1 else LayerCache(*joined))
    return cache


def layer_to_host(backend: Attention, layer: LayerCache, head_dim: int, layer_in_store: int = 0) -> Layer:
    """Keys and values of a layer as host arrays `[B, KV, S, Dh]`.

    In eight bits, `[B, KV, S, Dp + 4]`: heads as they are stored, rotated and padded, then each one's scale, a
    float32.
    """
    keys, values = map(np.asarray, layer)
    if backend.name in ("gpu", "tpu"):
        return keys, values
    if backend.name == "xla":
        keys, values = (np.moveaxis(leaf, 0, 2) for leaf in (keys, values))  # [B, KV, J, span, Dh]
        shape = (*keys.shape[:2], -1, keys.shape[4])
        return keys.reshape(shape), values.reshape(shape)
    keys, values = keys[layer_in_store], values[layer_in_store]
    rows, heads = keys.shape[:2]
    # [B, KV, block, D / W, 16, W] and [B, KV, tile, D / 16, word, 16, W], positions before dimensions
    by_key = keys.transpose(0, 1, 2, 4, 3, 5)
    by_value = values.transpose(0, 1, 2, 4, 6, 3, 5)
    whole = (rows, heads, keys.shape[2] * _LANES, -1)
    keys, values = by_key.reshape(whole), by_value.reshape(whole)
    if keys.dtype == np.int8:  # rotated and padded, and the bytes of the scale
        return keys[..., :-4], np.concatenate([values, keys[..., -4:]], axis=-1)
    return keys[..., :head_dim], values[..., :head_dim]


def layer_from_host(backend: Attention, keys: np.ndarray, values: np.ndarray) -> LayerCache:
    """The inverse of `layer_to_host`, bit for bit: a store of one layer."""
    if backend.name in ("gpu", "tpu"):
        return LayerCache(jax.device_put(keys), jax.device_put(values))
    rows, heads, positions, head_dim = keys.shape
    if backend.name == "xla":
        by_span = (rows, heads, -1, min(KEY_SPAN, positions), head_dim)
        return LayerCache(*(jax.device_put(np.moveaxis(x.reshape(by_span), 2, 0)) for x in (keys, values)))
    if keys.dtype == np.int8:
        keys, values = np.concatenate([keys, values[..., -4:]], axis=-1), values[..., :-4]
        head_dim = values.shape[-1]
    pack, width = _pack(keys.dtype), _width(head_dim, keys.dtype)
    keys, values = (np.pad(x, ((0, 0),) * 3 + ((0, width - head_dim),)) for x in (keys, values))
    by_key = keys.reshape(rows, heads, positions // _LANES, _LANES, -1, pack)
    by_value = values.reshape(rows, heads, -1, _LANES, pack, width // _LANES, _LANES)
    native = by_key.transpose(0, 1, 2, 4, 3, 5), by_value.transpose(0, 1, 2, 5, 3, 6, 4)
    return LayerCache(*(jax.device_put(np.ascontiguousarray(array[None])) for array in native))
