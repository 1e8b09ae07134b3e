"""How many slots and blocks an engine gets: what its memory budget holds, up to what pays off."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from xla_engine.config import AUTO, SMALLEST_BATCH, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.kv_cache.footprint import block_bytes
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.runner import memory

# More rows than these give hardly more tokens per second and each waits longer; `xla-engine sweep` shows where.
MOST_ROWS = {"cpu": 64}
MOST_ROWS_ELSEWHERE = 256


def resolve_sizes(config: EngineConfig, spec: ModelSpec, max_model_len: int, device: Any) -> EngineConfig:
    """Return the options with `max_num_seqs` as a number that fits on `device` (a jax device), and `num_blocks` as
    one where slots borrow blocks.

    max_num_seqs "auto" is the largest multiple of 8 whose weights, slots and workspace stay within
    `memory_utilization` of what the device has available, at most `MOST_ROWS`; where the system does not say, 8.
    kv_cache_memory_bytes becomes as many blocks as it holds; "auto" is what the slots leave, at most what they would
    take with `max_model_len` each. Raises ConfigError, with the arithmetic, where a number was asked for that does not
    fit, or nothing does, or the blocks would not hold one request of `max_model_len`.
    """
    available = memory.available_bytes(device)
    budget = None if available is None else int(available * config.memory_utilization)
    fills_memory = config.kv_cache_memory_bytes == AUTO
    config = _with_blocks(config, spec, max_model_len)

    def plan(slots: int) -> memory.MemoryPlan:
        return memory.plan_memory(spec, replace(config, max_num_seqs=slots), max_model_len, budget)

    slots = SMALLEST_BATCH if config.max_num_seqs == AUTO else config.max_num_seqs
    try:
        memory.check_memory(plan(slots))
    except ConfigError as error:
        assert available is not None
        share = f"memory_utilization {config.memory_utilization:g} of {memory.size(available)}"
        raise ConfigError(f"{error} ({share} is what the engine may take)") from error
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


def _with_blocks(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> EngineConfig:
    """`kv_cache_memory_bytes` as `num_blocks`; where it is "auto", the fewest."""
    asked, blocks = config.kv_cache_memory_bytes, _blocks_for(config, max_model_len)
    if asked is None:
        return config
    if asked != AUTO:
        needed, blocks = blocks, memory.blocks_within(spec, asked, config.block_size)
        if blocks < needed:
            block = block_bytes(spec, config.block_size)
            raise ConfigError(
                f"kv_cache_memory_bytes {asked} does not hold one request of max_model_len {max_model_len}: {needed} "
                f"blocks x {memory.size(block)} = {memory.size(needed * block)}. Give {needed * block} or more, or a "
                "smaller max_model_len"
            )
    return replace(config, kv_cache_memory_bytes=None, num_blocks=blocks)


def _blocks_for(config: EngineConfig, tokens: int) -> int:
    return -(-tokens // config.block_size)
