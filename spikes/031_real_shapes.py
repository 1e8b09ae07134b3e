# Frozen: runs at commit 6cafe6a.
"""How fast does each family decode on the shape of a model that people run, as a share of what memory gives?

    python -m spikes.031_real_shapes [--tiny]

Configurations are those published (`tests/support/published_configs.py`; routed and recurrent ones from here),
cut to as many layers as have room; weights are random. Most of a step is reading weights, so the measure is bytes
per second.
"""

# %%
from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spikes.support.timing import describe_machine, markdown_table
from tests.support.published_configs import PUBLISHED
from xla_engine.bench.limits import read_bandwidth
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import DeltaForm, ModelConfig
from xla_engine.graphs.model.decoder import parameter_shapes
from xla_engine.model_loader.checkpoint import random_checkpoint, read_config
from xla_engine.sampling_params import SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("--rows", type=int, default=8)
arguments.add_argument("--prompt", type=int, default=96)
arguments.add_argument("--tokens", type=int, nargs=2, default=(9, 57), help="a short and a long job")
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument(
    "--layer-bytes", type=float, default=1e9, help="layers kept, at most, but a whole period"
)
arguments.add_argument("--only", nargs="*")
arguments.add_argument(
    "--tiny", action="store_true", help="the tests' tiny models instead, first case of each"
)
options = arguments.parse_known_args()[0]

GOLDEN = Path("tests/golden/families")


def published(name: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(PUBLISHED[name][0]))
        return read_config(folder)


def routed(
    name: str, sizes: tuple[int, ...], layers: int, experts: dict[str, int], **others: Any
) -> ModelConfig:
    """The flags of a tiny model on real sizes: hidden, query heads, key heads, head, vocabulary."""
    tiny = read_config(GOLDEN / name)
    assert tiny.experts is not None
    fields = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return replace(
        tiny,
        **dict(zip(fields, sizes, strict=True)),
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        experts=replace(tiny.experts, **experts),
        intermediate_size=experts["moe_intermediate_size"],
        mlp_only_layers=(),
        rope_scaling=None,
        **others,
    )


MODELS = {name: published(name) for name in PUBLISHED} | {
    "Mixtral-8x7B": routed(
        "mixtral", (4096, 32, 8, 128, 32000), 1,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336},
    ),
    "Qwen3-30B-A3B": routed(
        "qwen3_moe", (2048, 32, 4, 128, 151936), 2,
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "gpt-oss-20b": routed(
        "gpt_oss", (2880, 64, 8, 64, 201088), 2,
        {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 2880},
        layer_types=("sliding_attention", "full_attention"), sliding_window=128,
    ),
    "Qwen3-Next-80B-A3B": routed(
        "qwen3_next", (2048, 16, 2, 256, 151936), 2,
        {
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        layer_types=("linear_attention", "full_attention"),
        delta=DeltaForm(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6),
    ),
}  # fmt: skip


TINY = (
    *("llama_yarn", "smollm3", "mistral_window", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
    *("phi3_long", "olmo2", "olmo3", "granite", "cohere", "cohere2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5"),
)
if options.tiny:
    MODELS = {name: read_config(GOLDEN / name) for name in TINY}


def cut(config: ModelConfig) -> ModelConfig:
    """As many layers as `--layer-bytes` holds, and the first period of kinds of layers at least."""
    sizes = layer_bytes(config)
    kinds = config.layer_types
    period = next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), 1)
    count = max(period, int(options.layer_bytes // max(sizes)))
    count = min(config.num_hidden_layers, count)
    still = tuple(index for index in config.no_rope_layers if index < count)
    return replace(config, num_hidden_layers=count, layer_types=kinds[:count], no_rope_layers=still)


def layer_bytes(config: ModelConfig) -> list[int]:
    found = [0] * config.num_hidden_layers
    for name, shape in parameter_shapes(config).items():
        if name.startswith("layers."):
            found[int(name.split(".")[1])] += 2 * prod(shape)
    return found


def bytes_of_a_step(config: ModelConfig) -> float:
    """Weights that a step reads; of experts, those that so many random choices hit."""
    total = 0.0
    for name, shape in parameter_shapes(config).items():
        if name == "embed" and not config.tie_word_embeddings:
            continue
        share = 1.0
        if config.experts is not None and len(shape) == 3:
            taken = config.experts.num_experts_per_tok / config.experts.num_experts
            share = 1 - (1 - taken) ** options.rows
        total += 2 * prod(shape) * share
    return total


class Random(Mapping[str, np.ndarray]):
    """Weights whose values repeat every million: made as fast as memory is written."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = parameter_shapes(config)
        draw = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
        self._values = (draw * np.float32(0.03)).astype(ml_dtypes.bfloat16)

    def __getitem__(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.resize(self._values, shape)

    def __iter__(self) -> Any:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def seconds_of_a_step(config: ModelConfig) -> tuple[list[float], dict[str, str]]:
    """Per round; and which backends served. A step's time is that between a short and a long job."""
    checkpoint = random_checkpoint(config, weights=Random(config))
    engine = XlaBatchEngine(
        checkpoint,
        None,
        EngineConfig(
            max_num_seqs=options.rows,
            max_model_len=256,
            prefill_lanes=(8,),
            self_check=False,
            enable_prefix_caching=False,
        ),
    )

    def job(tokens: int) -> float:
        rng = np.random.default_rng(1)
        began = time.perf_counter()
        for _ in range(options.rows):
            prompt = rng.integers(1, config.vocab_size, options.prompt).tolist()
            engine.submit(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        engine.drain()
        return time.perf_counter() - began

    short, long = options.tokens
    job(short)
    found = [(job(long) - job(short)) / (long - short) for _ in range(options.rounds)]
    platform = engine.runner.platform
    engine.close()
    return sorted(found), platform


print(f"{describe_machine()}\n")
limit = read_bandwidth(2)
print(f"read limit {limit:.1f} GB/s; {options.rows} rows, {options.prompt} prompt tokens\n")
table = []
for name, whole in MODELS.items():
    if options.only and name not in options.only:
        continue
    config = cut(whole)
    times, platform = seconds_of_a_step(config)
    middle, read = times[len(times) // 2], bytes_of_a_step(config) / 1e9
    spread = f"{1e3 * middle:.1f} ({1e3 * times[0]:.1f}-{1e3 * times[-1]:.1f})"
    served = (platform["attention"], platform["linear"])
    rates = (f"{options.rows / middle:.0f}", f"{read / middle:.1f}", f"{read / middle / limit:.0%}")
    table.append([name, f"{config.num_hidden_layers}", *served, f"{read:.2f}", spread, *rates])
    print(table[-1], flush=True)
header = (
    "shape",
    "layers",
    "attention",
    "products",
    "GB a step",
    "ms a step",
    "tok/s",
    "GB/s",
    "of the limit",
)
print("\n" + markdown_table(header, table))
