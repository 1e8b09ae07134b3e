"""What a model needs on this machine, for `inspect_model`: its form, its backends and the memory."""

import contextlib
from collections import Counter
from dataclasses import asdict, replace
from math import prod
from typing import Any

from xla_engine.config import AUTO, IMAGE_CACHE_BYTES, KEPT, SMALLEST_BATCH, EngineConfig
from xla_engine.engine.form_estimates import form_estimates
from xla_engine.engine.inspection_report import SLOTS, Inspection
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.images.processor import most_tokens, read_image_processor
from xla_engine.images.tower import slices_of, why_no_pictures
from xla_engine.model_loader.checkpoint import load_weights
from xla_engine.model_loader.config_only import ConfigOnly
from xla_engine.model_loader.describe import ModelDescription
from xla_engine.model_loader.pooling import encoder_options
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.model_loader.vision import load_vision
from xla_engine.model_loader.weights import StoredWeights, stored_kinds
from xla_engine.runner import memory
from xla_engine.runner.backends import bf16_products_of, library_of, serving_device
from xla_engine.runner.features import place_bytes, places_within, with_lanes_for
from xla_engine.runner.kept_leaves import leaves_on_disk
from xla_engine.runner.memory_plan import check_memory
from xla_engine.runner.native_library.build import building_nothing
from xla_engine.runner.sizing import resolve_length, resolve_sizes
from xla_engine.runner.weight_form import resolve_form

_LENGTHS = tuple(1 << power for power in range(9, 21, 2))


def add_footprint(
    report: Inspection, model: ModelConfig, config: EngineConfig, described: ModelDescription | None
) -> None:
    """Complete a report about a model of a supported configuration.

    described: the model; None if that failed, which the report says.
    """
    # Portable bits are those that the kernels have been seen to give.
    kernels = contextlib.nullcontext() if config.is_portable else building_nothing()
    with leaves_on_disk(enabled=config.compile_cache), kernels:
        stored: StoredKinds = {}
        report.parameters = sum(map(prod, parameter_shapes(model).values()))
        if described is not None and not isinstance(described.files, ConfigOnly):
            with report.noting():
                stored = _read_headers(report, described)
        with report.noting():
            _account(report, model, config, stored)


def _read_headers(report: Inspection, model: ModelDescription) -> StoredKinds:
    """Check the tensors against the configuration, and fill in what they tell."""
    checkpoint = load_weights(model)
    report.dtype = checkpoint.dtype
    if isinstance(checkpoint.weights, StoredWeights) and model.files.path.is_dir():
        report.quantised = dict(Counter(checkpoint.weights.forms))
    report.vision = _vision(model)
    return stored_kinds(checkpoint.weights)


def _vision(model: ModelDescription) -> dict[str, Any] | None:
    """`Inspection.vision`. Raises CheckpointError for a tower that does not load."""
    if not model.family.vision:
        return None
    if (why := why_no_pictures(model)) is not None:
        return {"refused": why}
    vision = load_vision(model.files, dtype=model.options.dtype)
    processor = read_image_processor(model.files.path, model.options.mm_processor_kwargs)
    places = places_within(vision.config, model.options.image_cache_bytes or IMAGE_CACHE_BYTES)
    largest = most_tokens(processor) or vision.config.place_tokens
    return {
        "weights": vision.weights.nbytes,
        "features": places * place_bytes(vision.config),
        "tokens": places * vision.config.place_tokens,
        "slices": slices_of(vision.config, processor, model).by_tokens,
        "lanes": with_lanes_for(vision.config, largest, model.options).prefill_lanes,
    }


def _account(report: Inspection, model: ModelConfig, config: EngineConfig, stored: StoredKinds) -> None:
    """Fill in backends, memory and `fits`. Raises ConfigError if the configuration does not fit."""
    assert report.dtype is not None
    device = serving_device()
    free = memory.available_to_each(device, config.tensor_parallel_size)
    budget = None if free is None else int(free * config.memory_utilization)
    form = resolve_form(config, model, report.dtype, stored)
    config = form.config
    if model.encodes:
        _account_encoder(report, form.spec_of(model), encoder_options(config, model), budget)
        return

    def spec_of(length: int) -> ModelSpec:
        return form.spec_of(model.within(length))

    vision = report.vision or {}
    config = replace(config, prefill_lanes=vision.get("lanes", config.prefill_lanes))
    extra = memory.ExtraMemory(vision.get("weights", 0) + vision.get("features", 0))
    config = resolve_length(config, model, form.spec_of, device)
    length = config.context_length(model.max_position_embeddings)
    spec = spec_of(length)
    refusal = None
    try:
        config = resolve_sizes(config, spec, length, device, extra)
    except ConfigError as error:
        refusal = error
        if config.max_num_seqs == AUTO:
            config = replace(config, max_num_seqs=SMALLEST_BATCH)
    plan = memory.plan_memory(spec, config, length, budget, extra)
    if config.quantization in KEPT:
        report.unpacked = dict(
            Counter(
                kind
                for leaf, parts in stored.items()
                for kind, _ in parts
                if spec.leaves[leaf].form is None and kind not in TensorFiles.dtypes
            )
        )
    report.forms = [asdict(each) for each in form_estimates(spec, config.quantization, stored)]
    report.backends = _backends(spec)
    report.memory = {
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "kv_bytes_per_token": memory.kv_bytes_per_token(spec_of(model.max_position_embeddings)),
        **asdict(plan),
        "needed": plan.needed,
        "arithmetic": plan.arithmetic(),
    }
    longest = min(model.max_position_embeddings, _LENGTHS[-1])
    for length in (*(length for length in _LENGTHS if length < longest), longest):
        plan = memory.plan_memory(spec_of(length), config, length, budget, extra)
        needed = {slots: replace(plan, slots=slots).needed for slots in SLOTS}
        report.fits.append({"max_model_len": length, "needed": needed, "most_slots": plan.most_slots})
    if refusal is not None:
        raise refusal


def _account_encoder(report: Inspection, spec: ModelSpec, config: EngineConfig, budget: int | None) -> None:
    """As `_account`, for an encoder, whose texts keep nothing on the device."""
    length = config.context_length(spec.config.max_position_embeddings)
    plan = memory.encoder_plan(spec, length, budget)
    report.backends = _backends(spec)
    report.memory = {"max_model_len": length, **asdict(plan), "needed": plan.needed}
    check_memory(plan)


def _backends(spec: ModelSpec) -> dict[str, str]:
    device = serving_device()
    return {
        "attention": spec.attention.name,
        "linear": "xla" if spec.products is None else spec.products.name,
        "isa": spec.isa or "none",
        "library": library_of(spec) or "none",
        **{f"{kind}_products": how for kind, how in bf16_products_of(spec).items()},
        "device": f"{device.platform} ({device.device_kind})",
    }
