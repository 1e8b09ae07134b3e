"""What an engine will be on a device, decided before anything is loaded: its spec, sizes and pool of blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs import target
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.graphs.row_state.rows import Pool
from xla_engine.runner import memory
from xla_engine.runner.devices import Devices
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.sizing import check_block_size, few_rows, resolve_length, resolve_sizes
from xla_engine.runner.weight_form import resolve_form

MakeProposer = Callable[[EngineConfig, ModelConfig, int], DeviceProposer]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """An engine's shapes.

    spec: of the model. devices: that share it. config: the options, all resolved.
    context_length: the longest request.
    buckets: the key lengths of the programs. few: the numbers of rows with decode programs of their own.
    pool: of KV blocks; None: every slot has its own memory.
    form_note: as `WeightForm.note`. proposer: drafts on the device; None without one.
    """

    spec: ModelSpec
    devices: Devices
    config: EngineConfig
    context_length: int
    buckets: tuple[int, ...]
    few: tuple[int, ...]
    pool: Pool | None
    form_note: str | None
    proposer: DeviceProposer | None

    @property
    def model(self) -> ModelConfig:
        return self.spec.config


def plan_engine(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    stored: StoredKinds,
    device: Any,
    make_proposer: MakeProposer | None = None,
) -> PlannedEngine:
    """Plan the engine for `device`, which is one of `graphs.target.devices`. Raises ConfigError.

    stored: as in `make_spec`. make_proposer: called with options, model and context length.
    """
    asked = config.quantization
    form = resolve_form(config, model, dtype, stored)
    config = resolve_length(form.config, model, form.spec_of, device)
    context_length = config.context_length(model.max_position_embeddings)
    model = model.within(context_length)
    spec = form.spec_of(model)
    one_row_code, on_cpu = has_one_row_code(spec), device.platform == "cpu"
    if not on_cpu and not one_row_code:
        # XLA's products of other sizes may add in another order there, which changes a bit now and then: too
        # seldom for the self-check to find it each time (findings/gpu.md).
        config = replace(config, prefill_lanes=config.prefill_lanes[-1:])
    _check_prefix_cache(config, spec, one_row_code=one_row_code, drafts=make_proposer is not None)
    _check_speculation(config, one_row_code=one_row_code)
    devices = Devices(spec.sharding.devices)
    buckets = config.buckets(context_length)
    if spec.attention.bounded_by_length or not on_cpu:
        buckets = buckets[-1:]
    proposer = None
    if make_proposer is not None:  # adapters do not apply to the draft model
        own = replace(config, enable_lora=False, quantization=asked)
        proposer = make_proposer(own, model, context_length)
    check_block_size(config, spec)
    extra = memory.NOTHING if proposer is None else proposer.extra
    config = resolve_sizes(config, spec, context_length, device, extra)
    return PlannedEngine(
        spec=spec,
        devices=devices,
        config=config,
        context_length=context_length,
        buckets=buckets,
        few=few_rows(config) if one_row_code else (),
        pool=_pool(config, buckets[-1]),
        form_note=form.note,
        proposer=proposer,
    )


def has_one_row_code(spec: ModelSpec) -> bool:
    """Whether a row runs through the same code in prefill and decode, at any place in a call: the C++ kernels, and on
    a GPU its kernels, for models whose layers are all in them (findings/gpu.md).

    Otherwise, even if the self-check found equal bits, they may differ in one sample of a hundred.
    """
    model = spec.config
    names = {spec.attention.name, None if spec.products is None else spec.products.name}
    if names == {"gpu"}:  # interpreted on a CPU, products are XLA's
        return target.platform() == "gpu" and model.recurrent is None and model.experts is None
    return names == {"native"} and (model.recurrent is None or spec.native_state is not None)


def _pool(config: EngineConfig, positions: int) -> Pool | None:
    if config.num_blocks is None:
        return None
    blocks_of_a_slot = positions // config.block_size
    own = blocks_of_a_slot if config.shadow_rate else 0
    return Pool(config.num_blocks + own, config.block_size, blocks_of_a_slot)


def _check_prefix_cache(config: EngineConfig, spec: ModelSpec, *, one_row_code: bool, drafts: bool) -> None:
    """Raise ConfigError if there cannot be `prefix_cache_dir`. drafts: a model drafts on the device."""
    if config.prefix_cache_dir is None:
        return
    if spec.isa is None or not one_row_code:
        raise ConfigError(
            "prefix_cache_dir needs the C++ kernels, with which a prefix has the same bits in every run: leave "
            "it out, or choose dtype bfloat16 and an isa of this machine"
        )
    if spec.config.recurrent is not None and not config.saves_states:
        raise ConfigError(
            "prefix_cache_dir needs the states of recurrent layers, which this model has: add mamba_cache_mode "
            "'align', or leave prefix_cache_dir out"
        )
    if drafts:
        raise ConfigError(
            "prefix_cache_dir does not keep the cache of a draft model: leave it out, or speculate with method "
            "'ngram' or 'suffix'"
        )


def _check_speculation(config: EngineConfig, *, one_row_code: bool) -> None:
    """Raise ConfigError if no self-check can show that verify steps have the bits of decode steps."""
    if config.speculation is None or (config.self_check and one_row_code):
        return
    why = (
        "prefill and decode do not run the same code (they do with the C++ kernels, in bfloat16 and int8, and on "
        "a GPU in bfloat16, without experts, recurrent layers and adapters)"
    )
    if not config.self_check:
        why = "no self-check runs (set self_check)"
    raise ConfigError(f"speculative_config: {why}, so speculation would change results here; leave it out")
