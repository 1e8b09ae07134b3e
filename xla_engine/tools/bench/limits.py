"""The limits of the machine, and the bytes and operations of a step."""

import os
import platform
from pathlib import Path
from typing import Any

from xla_engine.graphs.config import ModelConfig
from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS, features, processor_name
from xla_engine.utils.cores import cores

_BYTES = {"bfloat16": 2, "float32": 4}


def processor() -> dict[str, Any]:
    """The processor's model, the cores that this process may use, and the features that our operations can use."""
    wanted = {word for each in INSTRUCTION_SETS for word in (*each.needs, *(name for name, _ in each.extras))}
    return {"model": processor_name(), "cores": cores(), "flags": sorted(wanted & features())}


def describe_machine() -> str:
    """The processor in words."""
    found = processor()
    flags = " ".join(found["flags"]) or platform.machine()
    return f"{found['cores']} cores of {found['model']} ({flags}), Python {platform.python_version()}"


def busy_seconds() -> float:
    """Time that this process's cores have spent on anything since the system started, where it tells; else 0."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *counts in map(str.split, lines):
        if name in wanted:
            user, nice, system, _idle, _waiting, *rest = map(int, counts[:8])
            ticks += user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK")


def weight_count(config: ModelConfig) -> int:
    """Weights every token is multiplied with: all matrices, the embedding as output head only."""
    attention = config.hidden_size * (config.qkv_features + config.num_attention_heads * config.head_dim)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * layer + config.vocab_size * config.hidden_size


def step_bytes(
    config: ModelConfig, dtype: str, rows: int, keys: float, *, weight_bytes: float | None = None
) -> float:
    """Bytes a decode step of `rows` rows must read: every weight once, and `keys` keys and values per row.

    weight_bytes: of all weights; None: those of `dtype`.
    """
    parts = 2 if config.latent is None else 1
    per_key = parts * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    weights = _BYTES[dtype] * weight_count(config) if weight_bytes is None else weight_bytes
    return weights + _BYTES[dtype] * rows * keys * per_key


def token_flops(config: ModelConfig, keys: float) -> float:
    """Operations of one token that attends to `keys` keys."""
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * keys
    return 2 * (weight_count(config) + attention)


def prompt_flops(config: ModelConfig, length: int) -> float:
    """Operations of a prompt: half of the keys on average, and one position through the output head."""
    head = 2 * config.vocab_size * config.hidden_size
    return length * (token_flops(config, length / 2) - head) + head
