"""How many slots an engine gets: what its memory budget holds, up to what pays off."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from graphs.model import ModelSpec
from xla_engine import memory
from xla_engine.config import AUTO, SMALLEST_BATCH, EngineConfig
from xla_engine.errors import ConfigError

# More rows than these give hardly more tokens per second and each waits longer; `xla-engine sweep` shows where.
MOST_ROWS = {"cpu": 64}
MOST_ROWS_ELSEWHERE = 256


def sized(config: EngineConfig, spec: ModelSpec, max_model_len: int, device: Any) -> EngineConfig:
    """The options with `max_num_seqs` as a number that fits on `device` (a jax device).

    "auto" is the largest multiple of 8 whose weights, slots and workspace stay within `memory_utilization` of what the
    device has available, at most `MOST_ROWS`; where the system does not say what it has, 8. Raises ConfigError, with
    the arithmetic, where a number was asked for that does not fit, or nothing does.
    """
    available = memory.available_bytes(device)
    budget = None if available is None else int(available * config.memory_utilization)

    def plan(slots: int) -> memory.MemoryPlan:
        return memory.plan_memory(spec, replace(config, max_num_seqs=slots), max_model_len, budget)

    slots = SMALLEST_BATCH if config.max_num_seqs == AUTO else config.max_num_seqs
    try:
        memory.check_memory(plan(slots))
    except ConfigError as error:
        assert available is not None
        share = f"memory_utilization {config.memory_utilization:g} of {memory.size(available)}"
        raise ConfigError(f"{error} ({share} is what the engine may take)") from error
    if config.max_num_seqs != AUTO:
        return config
    most = MOST_ROWS.get(device.platform, MOST_ROWS_ELSEWHERE)
    choices = range(SMALLEST_BATCH, (SMALLEST_BATCH if budget is None else most) + 1, SMALLEST_BATCH)
    fitting = bisect_left(choices, True, key=lambda slots: not plan(slots).fits)
    return replace(config, max_num_seqs=choices[fitting - 1])
