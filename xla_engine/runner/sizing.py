"""Chooses the numbers of slots and blocks, and the context length, from the memory budget."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xla_engine.config import AUTO, DEFAULT_MAX_MODEL_LEN, SMALLEST_BATCH, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import block_bytes, keeps_every_position, state_bytes
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner import memory
from xla_engine.runner.memory_plan import MemoryPlan, check_memory
from xla_engine.utils.sizes import size

# Beyond these, more rows add little throughput but latency; `xla-engine sweep` shows the trade-off.
MOST_ROWS = {"cpu": 64}
MOST_ROWS_ELSEWHERE = 256
FEW_ROWS = (1, 4)
DEFAULT_SHARE = 0.25  # share of the device's memory that the default `max_model_len` may need
USUAL_SLOTS = 16  # slots assumed for that if the number of slots is "auto"


SpecOf = Callable[[ModelConfig], ModelSpec]


def resolve_length(config: EngineConfig, model: ModelConfig, spec_of: SpecOf, device: Any) -> EngineConfig:
    """Choose `max_model_len` if it is None and the model's limit exceeds the default.

    It becomes the model's limit if the engine then needs at most `DEFAULT_SHARE` of the total memory of `device`;
    otherwise it is halved until it does, but not below `DEFAULT_MAX_MODEL_LEN`. Weights count as they are without
    quantisation, so the length does not depend on their form. It is the same at every start on one machine. A model
    whose rotary frequencies depend on the context length keeps the default, because bits must not depend on the size
    of the memory. spec_of: makes the spec of the model, or of one of another length.
    """
    limit = model.max_position_embeddings
    by_length = any(rope is not None and rope.follows_context for rope in model.ropes)
    if config.max_model_len is not None or limit <= DEFAULT_MAX_MODEL_LEN or by_length:
        return config
    length = limit
    while length > DEFAULT_MAX_MODEL_LEN and not _fits(config, spec_of(model.within(length)), length, device):
        length //= 2
    return replace(config, max_model_len=max(length, DEFAULT_MAX_MODEL_LEN))


def _fits(config: EngineConfig, spec: ModelSpec, length: int, device: Any) -> bool:
    """Whether an engine with the given slots, or `USUAL_SLOTS`, of `length` tokens needs at most `DEFAULT_SHARE`."""
    config = replace(config, memory_utilization=min(config.memory_utilization, DEFAULT_SHARE))
    if config.num_blocks is not None and config.num_blocks * config.block_size < length:
        return False
    if config.max_num_seqs == AUTO:
        config = replace(config, max_num_seqs=USUAL_SLOTS)
    plain = memory.ExtraMemory(memory.plain_bytes(spec) - memory.weights_bytes(spec))
    try:
        resolve_sizes(config, spec, length, device, plain, available=memory.total_to_each)
    except ConfigError:
        return False
    return True


def few_rows(config: EngineConfig) -> tuple[int, ...]:
    """The numbers of rows for which there are separate decode programs, ascending: at most a quarter of all rows.

    See findings/step_programs.md for the reason.
    """
    return tuple(rows for rows in FEW_ROWS if rows * 4 <= config.device_rows)


def check_block_size(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if the attention has no blocks of this size, which depends on the cache's dtype."""
    if not config.uses_blocks:
        return
    try:
        block_bytes(spec, config.block_size)
    except ValueError as error:
        raise ConfigError(
            f"{error}, by this attention and the dtype of its cache; change block_size"
        ) from error


def resolve_sizes(
    config: EngineConfig,
    spec: ModelSpec,
    max_model_len: int,
    device: Any,
    extra: memory.ExtraMemory = memory.NOTHING,
    *,
    available: Callable[[Any, int], int | None] = memory.available_to_each,
) -> EngineConfig:
    """Choose the sizes that fit on `device` (a jax device).

    extra: additional memory for a draft model. available: returns the memory of each of several devices like
        `device`.

    max_num_seqs becomes a number. "auto" is the largest multiple of 8, up to `MOST_ROWS`, with which the engine needs
    at most `memory_utilization` of the available memory; if that is unknown, 8.
    kv_cache_memory_bytes becomes `num_blocks`. "auto" is the memory that slots leave, at most enough for
    `max_model_len` tokens in every slot.

    Raises ConfigError, with the arithmetic, if nothing fits, if a given number does not fit, or if the blocks could
    not hold one request of `max_model_len`.
    """
    if config.saves_states:
        _check_states(config, spec, max_model_len)
    memory_bytes = available(device, config.tensor_parallel_size)
    budget = None if memory_bytes is None else int(memory_bytes * config.memory_utilization)
    fills_memory = config.kv_cache_memory_bytes == AUTO
    config = _with_blocks(config, spec, max_model_len)

    def plan(slots: int) -> MemoryPlan:
        return memory.plan_memory(spec, replace(config, max_num_seqs=slots), max_model_len, budget, extra)

    slots = SMALLEST_BATCH if config.max_num_seqs == AUTO else config.max_num_seqs
    try:
        check_memory(plan(slots))
    except ConfigError as error:
        assert memory_bytes is not None
        share = f"memory_utilization {config.memory_utilization:g} of {size(memory_bytes)}"
        raise ConfigError(f"{error} ({share} is the limit for the engine)") from error
    if config.max_num_seqs == AUTO:
        most = MOST_ROWS.get(device.platform, MOST_ROWS_ELSEWHERE)
        choices = range(SMALLEST_BATCH, (SMALLEST_BATCH if budget is None else most) + 1, SMALLEST_BATCH)
        slots = choices[bisect_left(choices, True, key=lambda slots: not plan(slots).fits) - 1]
        config = replace(config, max_num_seqs=slots)
    if fills_memory:
        whole, left = slots * _blocks_for(config, max_model_len), plan(slots).most_pool
        fitting = whole if left is None else memory.blocks_within(spec, left, config.block_size)
        config = replace(config, num_blocks=min(whole, fitting))
    return config


def _check_states(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> None:
    """Raise ConfigError if a prompt of this model cannot begin after a prefix whose state was saved."""
    if not state_bytes(spec):
        raise ConfigError(
            "mamba_cache_mode 'align' is for models with recurrent layers, and this one has none: leave it out"
        )
    if not keeps_every_position(spec, max_model_len, saves_states=True):
        raise ConfigError(
            "mamba_cache_mode 'align' does not support sliding windows, which this model has: leave it out"
        )


def _with_blocks(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> EngineConfig:
    """Convert `kv_cache_memory_bytes` to `num_blocks`; if it is "auto", to the fewest possible."""
    asked, blocks = config.kv_cache_memory_bytes, _blocks_for(config, max_model_len)
    if asked is None:
        return config
    if asked != AUTO:
        needed, blocks = blocks, memory.blocks_within(spec, asked, config.block_size)
        if blocks < needed:
            block = block_bytes(spec, config.block_size)
            raise ConfigError(
                f"kv_cache_memory_bytes {asked} does not hold one request of max_model_len {max_model_len}: {needed} "
                f"blocks x {size(block)} = {size(needed * block)}. Give {needed * block} or more, or a "
                "smaller max_model_len"
            )
    return replace(config, kv_cache_memory_bytes=None, num_blocks=blocks)


def _blocks_for(config: EngineConfig, tokens: int) -> int:
    return -(-tokens // config.block_size)
