"""A checkpoint's layer for multi-token prediction."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp

from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import FULL, ModelConfig
from xla_engine.graphs.steps.mtp import MtpWeights, mtp_form
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.families import Source, tensor_sources
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.weights import StoredWeights
from xla_engine.runner.backends import make_spec
from xla_engine.runner.drafting.head import DraftHead, packed

JOIN, TOKEN_NORM, HIDDEN_NORM = "mtp_join", "mtp_token_norm", "mtp_hidden_norm"
SHARED = ("embed", "head")  # leaves that are the model's own
_PREFIX = "mtp."


def mtp_config(model: ModelConfig) -> ModelConfig:
    """The configuration of a model of the one layer: full attention, and experts if the model has any."""
    return replace(model, num_hidden_layers=1, layer_types=(FULL,), mlp_only_layers=(), no_rope_layers=())


def joining_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves outside the layer."""
    size = model.hidden_size
    return {JOIN: (size, 2 * size), TOKEN_NORM: (size,), HIDDEN_NORM: (size,)}


def load_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """Load the MTP layer of a loaded model. Raises CheckpointError if its files have none."""
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
                f"{tensors.names}: tensor {source.name} of the MTP layer {found}; leave method 'mtp' out, or use a "
                f"checkpoint that has such a layer (Qwen3-Next, Qwen3.5)"
            )
    weights = StoredWeights(tensors, sources, config, checkpoint.dtype, more=shapes)
    return replace(checkpoint, config=config, weights=weights)


class Mtp(DraftHead):
    """The `DeviceProposer` of method "mtp"."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, context_length: int) -> None:
        """checkpoint: the result of `load_mtp`. Raises ConfigError."""
        model = checkpoint.config.within(context_length)
        self._weights = checkpoint.weights
        self._spec = spec = make_spec(config, model, jnp.dtype(checkpoint.dtype))
        own = [leaf.on_devices() for name, leaf in spec.leaves.items() if name not in SHARED]
        joining = sum(prod(shape) for shape in joining_shapes(model).values())
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in own) + joining * spec.dtype.itemsize
        super().__init__("mtp", mtp_form(spec), config, context_length, size)

    def place(self, weights: Mapping[str, jax.Array]) -> tuple[MtpWeights, list[jax.Array]]:
        spec, found = self._spec, dict(weights)
        for name in spec.leaves.sources:
            if name not in SHARED:
                found |= {
                    part: jax.device_put(leaf)
                    for part, leaf in spec.leaves.stored(name, self._weights[name]).items()
                }
        join, token_norm, hidden_norm = joining = [
            jax.device_put(packed(spec.products, self._weights[name]))
            for name in (JOIN, TOKEN_NORM, HIDDEN_NORM)
        ]
        decoder = [found[name] for name in spec.leaves]
        own = [*joining, *(found[name] for name in spec.leaves if name not in SHARED)]
        return MtpWeights(join, token_norm, hidden_norm, decoder), own
