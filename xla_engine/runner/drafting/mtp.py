"""The layer for multi-token prediction that a checkpoint brings: its weights, and on the device its state by slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import FULL, ModelConfig
from xla_engine.graphs.kv_cache.footprint import cache_bytes
from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.packing import unpack
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.graphs.steps.mtp import MtpState, MtpWeights, make_mtp_state, mtp_and_verify, read_prompts
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.families import Source, tensor_sources
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.weights import StoredWeights
from xla_engine.runner import memory
from xla_engine.runner.backends import make_spec

JOIN, TOKEN_NORM, HIDDEN_NORM = "mtp_join", "mtp_token_norm", "mtp_hidden_norm"
SHARED = ("embed", "head")  # leaves that are the model's own
_PREFIX = "mtp."


def mtp_config(model: ModelConfig) -> ModelConfig:
    """A model of the one layer: full attention, and experts where the model has any."""
    return replace(model, num_hidden_layers=1, layer_types=(FULL,), mlp_only_layers=(), no_rope_layers=())


def joining_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Leaves beside those of the layer."""
    size = model.hidden_size
    return {JOIN: (size, 2 * size), TOKEN_NORM: (size,), HIDDEN_NORM: (size,)}


def load_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """The layer of a loaded model. Raises CheckpointError where its files have none."""
    files = open_model(checkpoint.path)
    _, family = read_model(files)
    config = mtp_config(checkpoint.config)
    own = replace(
        family,
        layer=_PREFIX + "layers.{index}.",
        tensors={**family.tensors, "final_norm": (_PREFIX + "norm.weight",)},
    )
    shapes = joining_shapes(config)
    sources = {name: found for name, found in tensor_sources(config, own).items() if name not in SHARED}
    for leaf, name, offset in (
        (JOIN, "fc.weight", 0.0),
        (TOKEN_NORM, "pre_fc_norm_embedding.weight", family.norm_offset),
        (HIDDEN_NORM, "pre_fc_norm_hidden.weight", family.norm_offset),
    ):
        sources[leaf] = (Source(name=_PREFIX + name, shape=shapes[leaf], offset=offset),)
    tensors = files.tensors(source.name for parts in sources.values() for source in parts)
    for source in (source for parts in sources.values() for source in parts):
        info = tensors.tensors.get(source.name)
        if info is None or info.shape != source.shape:
            found = (
                "is missing" if info is None else f"has shape {list(info.shape)}, not {list(source.shape)}"
            )
            raise CheckpointError(
                f"{tensors.names}: tensor {source.name} of the MTP layer {found}; leave method 'mtp' out, or take a "
                "checkpoint that has such a layer (Qwen3-Next, Qwen3.5)"
            )
    weights = StoredWeights(tensors, sources, config, checkpoint.dtype, more=shapes)
    return replace(checkpoint, config=config, weights=weights)


class Mtp:
    """The `Guesser` of method "mtp"."""

    reads_prompts = True

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, context_length: int) -> None:
        """checkpoint: of the layer, as `load_mtp` gives it. Raises ConfigError."""
        model = checkpoint.config.within(context_length)
        self._weights = checkpoint.weights
        self._spec = spec = make_spec(config, model, jnp.dtype(checkpoint.dtype))
        self._context_length = context_length
        self._width = max(width for _, width in config.verify_shapes)
        if self._width > config.chunk_size:
            raise ConfigError(f"method 'mtp' needs a chunk_size of {self._width} or more")
        own = [leaf for name, leaf in zip(spec.names, spec.leaves, strict=True) if name not in SHARED]
        joining = sum(int(np.prod(shape)) for shape in joining_shapes(model).values())
        self.beside = memory.Beside(
            sum(leaf.size * leaf.dtype.itemsize for leaf in own) + joining * spec.dtype.itemsize,
            cache_bytes(spec, 1, context_length) + 4 * self._width * model.hidden_size,
        )
        self._size = (0, 0)
        self._placed: MtpWeights | None = None
        self._own: list[jax.Array] = []
        self._rope: jax.Array | None = None
        self._state: MtpState | None = None

    @property
    def takes(self) -> tuple[Any, ...]:
        return self._placed, self._rope, self._state

    def keep(self, state: MtpState) -> None:
        self._state = state

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        self._size = rows, length
        spec, found = self._spec, dict(weights)
        for name in spec.sources:
            if name not in SHARED:
                found |= {
                    part: jax.device_put(leaf)
                    for part, leaf in spec.stored(name, self._weights[name]).items()
                }
        join, token_norm, hidden_norm = joining = [
            jax.device_put(_packed(spec.products, self._weights[name]))
            for name in (JOIN, TOKEN_NORM, HIDDEN_NORM)
        ]
        decoder = [found[name] for name in spec.names]
        self._placed = MtpWeights(join, token_norm, hidden_norm, decoder)
        self._own = [*joining, *(found[name] for name in spec.names if name not in SHARED)]
        self._rope = jax.device_put(rope_tables(spec.config, self._context_length))
        self._state = make_mtp_state(spec, rows, length, self._width)

    def step(self, spec: ModelSpec, key_length: int, width: int, *, processed: bool) -> Callable[..., Any]:
        return functools.partial(
            mtp_and_verify, self._spec, spec, key_length, width, processed_logprobs=processed
        )

    def read(self, spec: ModelSpec, key_length: int, lanes: Any, rows: Rows) -> Callable[..., Any]:
        def run(
            weights: list[jax.Array], rope: jax.Array, hidden: jax.Array, work: jax.Array, *own: Any
        ) -> MtpState:
            del rope  # the layer's own
            return read_prompts(
                self._spec, spec, key_length, weights, hidden, unpack(work, lanes), rows, *own
            )

        return run

    def blank(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = make_mtp_state(self._spec, *self._size, self._width)

    def delete(self) -> None:
        for leaf in jax.tree.leaves((self._own, self._rope, self._state)):
            leaf.delete()
        self._own, self._placed, self._rope, self._state = [], None, None, None


def _packed(products: Products | None, leaf: np.ndarray) -> np.ndarray:
    return leaf if products is None or leaf.ndim < 2 else products.pack(leaf)
