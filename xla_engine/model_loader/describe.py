"""Describe a model in one record: everything in its files except weights and tokenizer. Does not import jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.config_json import (
    SpecialTokens,
    overridden,
    read_special_tokens,
    transformers_model,
)
from xla_engine.model_loader.families import Family, tensor_sources
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.pooling import (
    Encode,
    PoolingForm,
    choose_runner,
    decoder_fields,
    encoder_options,
    is_headless,
    read_pooling,
)
from xla_engine.model_loader.quantised.methods import without_method
from xla_engine.sampling_params import FOR_READERS, LEAST_TEMPERATURE, SamplingParams

if TYPE_CHECKING:
    from xla_engine.model_loader.weights import Sources

# Sampling fields of generation_config.json and our names. As in vLLM, `do_sample` is not among them.
_NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_NAMES |= {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model as its files describe it.

    files: its files. options: of the engine, with the runner and vLLM's names of quantisation resolved.
    fields: config.json with `hf_overrides`. config: its shape. family: its tensor names.
    original: shape and names in transformers' layout, whatever files the model is in.
    headless: whether the output head is not loaded.
    sampling_defaults: recommended fields of `SamplingParams`, if `generation_config` enables them.
    pooling: how it pools; None for a generative model.
    """

    files: ModelFiles
    options: EngineConfig
    fields: Fields
    config: ModelConfig
    family: Family
    original: tuple[ModelConfig, Family]
    special_tokens: SpecialTokens
    headless: bool = False
    chat_template: ChatTemplate | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    pooling: PoolingForm | None = None

    @property
    def recommends_no_sampling(self) -> bool:
        """Whether its files say nothing about temperature and truncation, or are not asked."""
        return self.sampling_defaults.keys().isdisjoint(FOR_READERS)

    @property
    def sources(self) -> Sources:
        """By leaf, the tensors that form it in transformers' layout."""
        return tensor_sources(*self.original)


def describe(files: ModelFiles, options: EngineConfig, encode: Encode | None = None) -> ModelDescription:
    """Describe a model for an engine with these options.

    encode: tokenizes a text, for a classifier defined by tokens; None without a tokenizer. Raises CheckpointError
    naming file, field and remedy; ConfigError for options that do not fit the model.
    """
    model = describe_decoder(files, options)
    recommended = sampling_defaults(files) if model.options.generation_config == "model" else {}
    return replace(
        model,
        # Without recommendations the option has no effect, so it must not change the fingerprint.
        options=model.options if recommended else replace(model.options, generation_config="engine"),
        chat_template=files.chat_template(),
        sampling_defaults=recommended,
        pooling=read_pooling(files, model.fields, model.options, encode),
    )


def describe_decoder(files: ModelFiles, options: EngineConfig) -> ModelDescription:
    """`describe` without chat template, sampling defaults and pooling: enough to load the weights."""
    fields = overridden(files.config_fields(), options.hf_overrides or {})
    options = without_method(fields, choose_runner(files, fields, options))
    original = transformers_model(decoder_fields(files, fields, options))
    config, family = files.as_stored(*original)
    return ModelDescription(
        files=files,
        options=encoder_options(options, config),
        fields=fields,
        config=config,
        family=family,
        original=original,
        special_tokens=read_special_tokens(files, config),
        headless=is_headless(files, fields, options),
    )


def sampling_defaults(model: ModelFiles | Path | str) -> dict[str, Any]:
    """Fields of `SamplingParams` that a model (`open_model`) recommends; empty without generation_config.json.

    Raises CheckpointError naming file, field and remedy.
    """
    fields = open_model(model).generation_config()
    if fields is None:
        return {}
    found = {ours: fields.values[theirs] for theirs, ours in _NAMES.items() if fields.given(theirs)}
    if isinstance(warmth := found.get("temperature"), float) and 0 < warmth < LEAST_TEMPERATURE:
        found["temperature"] = 0  # frameworks that divide by the temperature write greedy sampling this way
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{fields.file}: {error}. Correct the file, or leave its sampling defaults out (generation_config engine)"
        ) from error
    return found
