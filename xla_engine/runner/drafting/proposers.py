"""Proposers on the device: draft models, EAGLE-3 heads, and layers for multi-token prediction (MTP)."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import AUTO, KEPT, EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import FULL, ModelConfig, whole_spans
from xla_engine.graphs.kv_cache.cache import cache_bytes, keeps_every_position
from xla_engine.graphs.linear.products import Products, Role
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.row_state.rows import unpack
from xla_engine.graphs.steps.draft_head import (
    Eagle3Weights,
    HeadForm,
    HeadState,
    MtpWeights,
    draft_by_head_and_verify,
    eagle3_form,
    make_head_state,
    mtp_form,
    read_prompts,
)
from xla_engine.graphs.steps.draft_model import FED, DraftForm, draft_and_verify, make_draft_state
from xla_engine.graphs.steps.step import StepForm
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.config_json import read_model
from xla_engine.model_loader.eagle3 import Eagle3Checkpoint, load_eagle3
from xla_engine.model_loader.families import Source, tensor_sources
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.weights import StoredWeights, stored_kinds
from xla_engine.runner import memory
from xla_engine.runner.backends import make_spec
from xla_engine.runner.devices import Devices
from xla_engine.runner.drafting.device_proposer import DeviceProposer, Place
from xla_engine.runner.weight_form import resolve_form
from xla_engine.speculative_config import ON_DEVICE
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.startup import silent

MakeProposer = Callable[[EngineConfig, ModelConfig, int], DeviceProposer]


def device_proposer_of(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None, draft: Checkpoint | None
) -> MakeProposer | None:
    """The function with which a runner makes its device proposer; None if drafting does not run on the device.

    draft: a loaded draft model or MTP layer; None loads the one that the options name, or the model's own.

    Raises ConfigError if a draft model has another tokenizer, and CheckpointError.
    """
    options = config.speculation
    if options is None or options.method not in ON_DEVICE:
        return None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative_config method {options.method!r} runs on one device; use tensor_parallel_size 1"
        )
    if options.method == "mtp":
        layer = load_mtp(checkpoint) if draft is None else draft
        return lambda config, model, context_length: mtp_head(layer, config, context_length)
    if options.method == "eagle3":
        assert options.model is not None
        head, dtype = load_eagle3(options.model, checkpoint), checkpoint.dtype
        return lambda config, model, context_length: eagle3_head(head, model, dtype, config, context_length)
    if draft is None:
        named = checkpoint.path / "draft" if options.model is None else options.model
        if isinstance(named, Path) and not named.is_dir():
            raise ConfigError(
                f"{checkpoint.path} has no draft model (a directory draft); "
                'name one with the same tokenizer as "model" in speculative_config'
            )
        files = open_model(named)
        own = Tokenizer.of_model(files)
        if tokenizer is not None and own is not None and not tokenizer.has_tokens_of(own):
            raise ConfigError(
                f"the draft model {str(named)!r} has another tokenizer than the model; use one of the same family"
            )
        draft = load_checkpoint(files, dtype=config.dtype)
    found = draft
    return lambda config, model, context_length: draft_model(found, config, model, context_length)


def draft_model(
    checkpoint: Checkpoint, config: EngineConfig, model: ModelConfig, context_length: int
) -> DeviceProposer:
    """A model of its own, which reads prompts from the rows' tokens. model: the engine's.

    Raises ConfigError if the two do not match.
    """
    own = checkpoint.config
    if own.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the draft model has {own.vocab_size} token ids and the model {model.vocab_size}; "
            "use one with the same tokenizer"
        )
    if own.max_position_embeddings < context_length:
        raise ConfigError(
            f"the draft model has {own.max_position_embeddings} positions, but requests may have "
            f"{context_length}; "
            f"use max_model_len {own.max_position_embeddings} or less, or another draft model"
        )
    if own.recurrent is not None:
        raise ConfigError("a draft model with recurrent layers is not supported; use one with attention only")
    if config.quantization in KEPT:  # the engine's file has this form, and the draft's one of its own
        config = replace(config, quantization=AUTO)
    own = own.within(context_length)
    form = resolve_form(config, own, checkpoint.dtype, stored_kinds(checkpoint.weights))
    spec = form.spec_of(own)
    reach = None if keeps_every_position(spec, context_length) else config.call_positions - FED
    slot = cache_bytes(spec, 1, context_length) + 4 * whole_spans(context_length)

    def place(_: Mapping[str, jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        weights = Devices(None).load(spec, checkpoint.weights, silent)
        return weights, weights

    return DeviceProposer(
        spec.config,
        context_length,
        memory.ExtraMemory(memory.weights_bytes(spec), slot),
        place=place,
        make_state=functools.partial(make_draft_state, spec),
        verify=functools.partial(draft_and_verify, DraftForm(spec, reach)),
    )


def _head(
    method: str, form: HeadForm, config: EngineConfig, context_length: int, place: Place, num_bytes: int
) -> DeviceProposer:
    """One layer that reads the hidden states of prefill and verify steps.

    num_bytes: of its weights, and of other memory that does not depend on the slots. Raises ConfigError.
    """
    layer, width = form.layer, max(width for _, width in config.verify_shapes)
    if width > config.chunk_size:
        raise ConfigError(f"method {method!r} needs a chunk_size of {width} or more")
    slot = cache_bytes(layer, 1, context_length) + 4 * width * layer.config.hidden_size
    return DeviceProposer(
        layer.config,
        context_length,
        memory.ExtraMemory(num_bytes, slot),
        place=place,
        make_state=lambda rows, length: make_head_state(layer, rows, length, width),
        verify=functools.partial(draft_by_head_and_verify, form),
        read=functools.partial(_reading, form),
        taps=form.taps,
    )


def _reading(head: HeadForm, form: StepForm, lanes: Any) -> Callable[..., Any]:
    """What `DeviceProposer.read` of a head returns."""

    def run(
        weights: list[jax.Array], rope: jax.Array, seen: jax.Array, work: jax.Array, *own: Any
    ) -> HeadState:
        del rope  # the layer's own
        return read_prompts(head, form, weights, seen, unpack(work, lanes), *own)

    return run


def packed(products: Products | None, leaf: np.ndarray, role: Role = "linear") -> np.ndarray:
    """A weight of a checkpoint, packed for the products; vectors stay as they are."""
    return leaf if products is None or leaf.ndim < 2 else products.pack(leaf, role)


_ROLES: dict[str, Role] = {
    "head": "head",
    "embed": "plain",
}  # of an EAGLE-3 head's weights; others are linear


def eagle3_head(
    head: Eagle3Checkpoint, model: ModelConfig, dtype: str, config: EngineConfig, context_length: int
) -> DeviceProposer:
    """An EAGLE-3 head; its weights are never quantised. model, dtype: of the engine. Raises ConfigError."""
    spec = make_spec(replace(config, quantization=None), head.config.within(context_length), jnp.dtype(dtype))
    form = eagle3_form(spec, head.taps, norm_before_residual=head.norm_before_residual)
    rows = config.chunk_size * config.prefill_lanes[-1]
    seen = 4 * rows * len(head.taps) * model.hidden_size  # bytes that a prefill call hands on

    def place(_: Mapping[str, jax.Array]) -> tuple[Eagle3Weights, list[jax.Array]]:
        placed = {
            name: jax.device_put(packed(spec.products, leaf, _ROLES.get(name, "linear")))
            for name, leaf in head.weights.items()
        }
        ids = None if head.ids is None else jax.device_put(head.ids)
        own = Eagle3Weights(**{"embed": None, **placed}, ids=ids)
        return own, jax.tree.leaves(own)

    return _head("eagle3", form, config, context_length, place, head.weights.nbytes + seen)


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
    weights = StoredWeights(tensors, sources, {**parameter_shapes(config), **shapes}, checkpoint.dtype)
    return replace(checkpoint, config=config, weights=weights)


def mtp_head(checkpoint: Checkpoint, config: EngineConfig, context_length: int) -> DeviceProposer:
    """An MTP layer. checkpoint: the result of `load_mtp`. Raises ConfigError."""
    model, weights = checkpoint.config.within(context_length), checkpoint.weights
    spec = make_spec(config, model, jnp.dtype(checkpoint.dtype))
    leaves = [leaf.on_devices() for name, leaf in spec.leaves.items() if name not in SHARED]
    joining = sum(prod(shape) for shape in joining_shapes(model).values())
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + joining * spec.dtype.itemsize

    def place(shared: Mapping[str, jax.Array]) -> tuple[MtpWeights, list[jax.Array]]:
        devices, found = Devices(None), dict(shared)
        for name in spec.leaves.sources:
            if name not in SHARED:
                found |= devices.leaf(spec, weights, name)
        join, token_norm, hidden_norm = joining = [
            jax.device_put(packed(spec.products, weights[name])) for name in (JOIN, TOKEN_NORM, HIDDEN_NORM)
        ]
        decoder = [found[name] for name in spec.leaves]
        own = [*joining, *(found[name] for name in spec.leaves if name not in SHARED)]
        return MtpWeights(join, token_norm, hidden_norm, decoder), own

    return _head("mtp", mtp_form(spec), config, context_length, place, size)
