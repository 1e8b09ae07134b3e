"""The state that a model keeps for its slots: a list of stores, each of one layer or of several equal layers."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.delta_net.layer import DeltaState, make_state
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec


def make_cache(
    spec: ModelSpec,
    rows: int,
    length: int,
    *,
    num_blocks: int | None = None,
    config: ModelConfig | None = None,
) -> KVCache:
    """Zeroed state of `rows` slots of `length` positions, whole spans: a record for each of `stores(spec)`.

    Layers of attention have keys and values in the layout of the spec's backend, linear ones a `DeltaState`. With
    `num_blocks`, keys and values are a pool of this many blocks of `length` positions each, for block tables; other
    state stays by row. `config`: if its heads are not those of one device. Raises ValueError for a block size that
    the backend cannot read.
    """
    config = spec.local if config is None else config
    cache: KVCache = []
    for layers in stores(spec):
        if config.is_linear(layers[0]):
            assert config.delta is not None
            cache.append(make_state(config.delta, rows))
        else:
            slots = rows if num_blocks is None else num_blocks
            cache.append(spec.attention.make_store(config, layers, slots, length, spec.dtype))
    return cache


def stores(spec: ModelSpec) -> list[list[int]]:
    """The layers of each store of a cache: layers with the same window together if the backend shares stores, each
    linear layer alone."""
    found: dict[Any, list[int]] = {}
    for index in range(spec.config.num_hidden_layers):
        alone = spec.config.is_linear(index) or not spec.attention.shares_stores
        alike = index if alone else ("window", spec.config.attention(index).window)
        found.setdefault(alike, []).append(index)
    return list(found.values())


def places(spec: ModelSpec) -> list[tuple[int, int]]:
    """The store of every layer, and the layer's index in it."""
    found = {
        index: (store, layer_in_store)
        for store, layers in enumerate(stores(spec))
        for layer_in_store, index in enumerate(layers)
    }
    return [found[index] for index in range(len(found))]


def to_host(spec: ModelSpec, cache: KVCache) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copies of every layer's state: keys and values `[B, KV, S, Dh]`, or the two arrays of a `DeltaState`."""
    found = []
    for store, layer_in_store in places(spec):
        kept = cache[store]
        if isinstance(kept, DeltaState):
            found.append((np.array(kept.inputs), np.array(kept.memory)))
        else:
            keys, values = spec.attention.to_host(kept, spec.config.head_dim, layer_in_store)
            found.append((np.array(keys), np.array(values)))
    return found


def from_host(spec: ModelSpec, layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> KVCache:
    """The inverse of `to_host`, bit for bit."""
    cache: KVCache = []
    for members in stores(spec):
        if spec.config.is_linear(members[0]):
            cache.append(DeltaState(*jax.device_put(layers[members[0]])))
            continue
        alone = [spec.attention.from_host(*layers[index]) for index in members]
        together = alone[0] if len(alone) == 1 else LayerCache(*map(_join, *alone))
        cache.append(together)
    return cache


def _join(*leaves: jax.Array) -> jax.Array:
    return jax.device_put(np.concatenate([np.asarray(leaf) for leaf in leaves]))
