# Frozen: runs at commit a8802fc.
"""Does any model family fall off the fast path? Decode of every dense family on one shape, against a plain Llama.

    python -m spikes.025_families

Flags come from the tiny models of `tests/golden/families`; sizes are those of SmolLM2-135M's layers, so that all
families move the same weights. What differs is what the flags add: norms, caps, windows, biases, multipliers.
"""

# %%
from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.bench.models import SMOLLM2_135M
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import random_checkpoint, read_config
from xla_engine.sampling_params import SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("--layers", type=int, default=10)
arguments.add_argument("--rows", type=int, default=8)
arguments.add_argument("--prompt", type=int, default=96)
arguments.add_argument("--tokens", type=int, default=33)
arguments.add_argument("--rounds", type=int, default=7)
options = arguments.parse_known_args()[0]

GOLDEN = Path("tests/golden/families")
CASES = (
    *("llama_yarn", "smollm3", "mistral_window", "ministral", "qwen2", "qwen3", "gemma"),
    *("gemma2", "gemma3", "phi3_long", "olmo2", "olmo3", "granite", "cohere", "cohere2"),
)
PLAIN = replace(SMOLLM2_135M, vocab_size=8192, num_hidden_layers=options.layers)


def widened(name: str) -> ModelConfig:
    """The flags of a tiny model on the common shape; layer kinds are repeated, windows are 64 keys."""
    tiny = read_config(GOLDEN / name)
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    count, kinds = options.layers, tiny.layer_types
    still = tuple(index for index in range(count) if index % tiny.num_hidden_layers in tiny.no_rope_layers)
    return replace(
        tiny,
        **{field: getattr(PLAIN, field) for field in (*shape, "head_dim", "tie_word_embeddings")},
        num_hidden_layers=count,
        layer_types=tuple(kinds[index % len(kinds)] for index in range(count)) if kinds else (),
        sliding_window=64 if tiny.sliding_window else None,
        no_rope_layers=still,
        rope_scaling=None if name.startswith("phi3") else tiny.rope_scaling,
        partial_rotary_factor=1.0,
    )


class Decode:
    """Greedy tokens of `rows` prompts that decode side by side; a call takes the first token of all, then the rest."""

    def __init__(self, config: ModelConfig) -> None:
        checkpoint = random_checkpoint(config, scale=0.04)
        engine = EngineConfig(
            max_num_seqs=options.rows, max_model_len=256, prefill_lanes=(8,), self_check=False
        )
        self.engine = XlaBatchEngine(checkpoint, None, engine)

    def __call__(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        for row in range(options.rows):
            self.engine.submit([row + 1] * options.prompt, params)
        self.engine.drain()


forms = {"Llama": Decode(PLAIN)} | {name: Decode(widened(name)) for name in CASES}
times = interleave(forms, options.rounds)
base = times["Llama"].median
print(f"{describe_machine()}\n\n{options.rows} requests of {options.prompt} + {options.tokens} tokens\n")
table = []
for name, each in times.items():
    platform = forms[name].engine.runner.platform
    table.append(
        [name, platform["attention"], platform["linear"], each.milliseconds(), f"{each.median / base:.2f}"]
    )
print(markdown_table(["family", "attention", "products", "ms", "against Llama"], table))
for form in forms.values():
    form.engine.close()
