"""What a model keeps of its slots: a list with one record per layer, whatever its kind."""

from __future__ import annotations

from dataclasses import replace

from graphs.attention import KVCache
from graphs.config import ModelConfig
from graphs.delta_net import make_state
from graphs.model import ModelSpec


def make_cache(spec: ModelSpec, rows: int, length: int, *, num_blocks: int | None = None) -> KVCache:
    """Zeroed state of `rows` slots of `length` positions, whole key blocks.

    Layers of attention have keys and values in the layout of the spec's backend, linear ones a `DeltaState`. With
    `num_blocks`, keys and values are a pool of so many pages of `length` positions each, for block tables; other
    state stays by row. Raises ValueError for a page the backend cannot read.
    """
    config = spec.config
    cache: KVCache = []
    for index in range(config.num_hidden_layers):
        if config.is_linear(index):
            assert config.delta is not None
            cache.append(make_state(config.delta, rows))
        else:
            slots = rows if num_blocks is None else num_blocks
            cache += spec.attention.make_cache(_only(config, index), slots, length, spec.dtype)
    return cache


def _only(config: ModelConfig, index: int) -> ModelConfig:
    """A model of one layer whose attention is that of layer `index`."""
    return replace(config, num_hidden_layers=1, layer_types=(config.layer_type(index),))
