"""The state that a model keeps for its slots: a list of stores, each of one layer or of several equal layers."""

from typing import Any

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.delta_net.layer import make_state
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
