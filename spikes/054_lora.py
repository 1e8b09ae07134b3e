# Frozen: runs at commit 9aa75a3.
"""What do LoRA adapters cost in decode and prefill, when many are in one batch?

python -m spikes.054_lora
"""

# %%
from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine import EngineConfig, LoRARequest, SamplingParams, XlaBatchEngine
from xla_engine.bench.models import SHAPES
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.model_loader.families import LLAMA, QWEN3, tensor_sources

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
parser.add_argument("--jobs", nargs="+", default=["decode", "prefill"])
parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
arguments = parser.parse_args()
ROWS, TOKENS, PROMPT = 8, 48, 256
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODEL = replace(SHAPES[arguments.shape], max_position_embeddings=8192)
CHECKPOINT = replace(
    random_checkpoint(MODEL, scale=0.04),
    sources=tensor_sources(MODEL, LLAMA if MODEL.qk_norm is None else QWEN3),
)
CONFIG = EngineConfig(max_num_seqs=ROWS, max_model_len=512, enable_prefix_caching=False, key_buckets=(512,))
draw = np.random.default_rng(0)
ids = itertools.count(1)


def adapter(rank: int, modules: Sequence[str]) -> LoRARequest:
    """A random adapter on disk."""
    number = next(ids)
    path = Path(directory.name, str(number))
    path.mkdir()
    tensors = {}
    for parts in CHECKPOINT.sources.values():
        for source in parts:
            if any(f".{module}." in source.name for module in modules):
                name = f"base_model.model.{source.name.removesuffix('.weight')}.lora_"
                a, b = (rank, source.shape[1]), (source.shape[0], rank)
                tensors[f"{name}A.weight"] = draw.standard_normal(a, np.float32) * np.float32(0.02)
                tensors[f"{name}B.weight"] = draw.standard_normal(b, np.float32) * np.float32(0.02)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter-{number}", number, str(path))


def run(engine: XlaBatchEngine, adapters: Sequence[LoRARequest | None], prompt: int, tokens: int) -> None:
    """ROWS requests that take turns with the adapters."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for row in range(ROWS):
        lora = adapters[row % len(adapters)]
        ids = [(row * 977 + k * 31) % MODEL.vocab_size for k in range(prompt)]
        engine.submit(ids, params, lora_request=lora)
    engine.drain()


# %%
directory = tempfile.TemporaryDirectory()
engines = {0: XlaBatchEngine(CHECKPOINT, None, CONFIG)}
cases: dict[str, tuple[int, list[LoRARequest | None]]] = {"engine without adapters": (0, [None])}
for rank in arguments.ranks:
    config = replace(CONFIG, enable_lora=True, max_loras=8, max_lora_rank=rank)
    engines[rank] = XlaBatchEngine(CHECKPOINT, None, config)
    whole = [adapter(rank, EVERY) for _ in range(4)]
    cases |= {
        f"rank {rank}: room for 8, no row has one": (rank, [None]),
        f"rank {rank}: one, every module": (rank, [*whole[:1]]),
        f"rank {rank}: four, every module": (rank, [*whole]),
        f"rank {rank}: four, queries and values": (
            rank,
            [adapter(rank, ("q_proj", "v_proj")) for _ in range(4)],
        ),
    }
print(describe_machine())
jobs = {
    "decode": (f"decode, {TOKENS} tokens", 1, TOKENS),
    "prefill": (f"prefill, {PROMPT} tokens", PROMPT, 1),
}
for job in arguments.jobs:
    title, prompt, tokens = jobs[job]
    forms = {
        name: lambda which=which, adapters=adapters, prompt=prompt, tokens=tokens: run(
            engines[which], adapters, prompt, tokens
        )
        for name, (which, adapters) in cases.items()
    }
    times = interleave(forms, rounds=arguments.rounds)
    base = times["engine without adapters"].seconds
    rows = []
    for name, found in times.items():
        ratios = sorted(mine / other for mine, other in zip(found.seconds, base, strict=True))
        rows.append([name, found.milliseconds(), f"{ratios[len(ratios) // 2]:.3f}"])
    print(markdown_table([f"{ROWS} rows, {title}", "ms", "of the first, by round"], rows))
for engine in engines.values():
    engine.close()
directory.cleanup()
