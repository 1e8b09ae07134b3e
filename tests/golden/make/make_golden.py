"""Make the golden files: what transformers computes in float32, kept so that tests need no torch.

    python tests/golden/make/make_golden.py                                 # tiny random checkpoints and their goldens
    python tests/golden/make/make_golden.py --embedded xla_engine/embedded  # goldens of the embedded model alone

Run with the `oracle` extra installed. `tests/golden/<name>/` is a model directory plus `golden.npz`:

    prompts        int32 [N, L]     token ids, padded with -1 (length 1 to about 100)
    tokens         int32 [N, 48]    greedy continuation, eos ids ignored
    gaps           float32 [N, 48]  logit of the chosen token minus the next best: small gaps are near-ties
    logits         float32 [M, V]   logits at the last prompt position of the first M prompts
    texts          str [N]          the prompts as text; the embedded model only

It imports nothing of this package: the oracle shares no code with what it checks.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # sums in one order on every machine

GOLDEN = Path(__file__).parents[2] / "golden"
NEW_TOKENS = 48
PROMPT_LENGTHS = (1, 2, 3, 7, 16, 31, 33, 64, 97, 100)

# name -> (seed, weights' deviation, LlamaConfig fields). Seeds were chosen for gaps of at least 0.003, some
# 75 times the float32 noise of the logits; other rotary frequencies change the tokens of every prompt.
TINY: dict[str, tuple[int, float, dict[str, Any]]] = {
    "gqa_tied": (
        0,
        0.45,
        {
            "hidden_size": 40,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "untied_odd_heads": (  # 6 heads over 3, head_dim is not hidden_size / heads; saved in shards
        0,
        0.3,
        {
            "hidden_size": 36,
            "intermediate_size": 32,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama3_rope": (  # wavelengths 6 to 20000 around a context of 32: kept, ramped and stretched ones
        1,
        0.45,
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
VOCABULARY = 199

SNIPPETS = (  # for the embedded model, which was trained on Python source
    "def",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    print(",
    "def read_lines(path):\n    with open(path) as file:\n        return [line",
    '"""Utilities for',
    "    if not isinstance(value, int):\n        raise TypeError(",
    "try:\n    import json\nexcept ImportError:\n",
    "# Copyright (c)",
    "def test_addition(self):\n    self.assertEqual(1 + 1,",
    "from collections import OrderedDict\n\n\nclass Cache(OrderedDict):\n    def __init__(self, size=128):\n"
    "        super().__init__()\n        self.size = size\n\n    def __getitem__(self, key):\n        value"
    " = super().__getitem__(key)\n        self.move_to_end(key)\n        return value\n\n    def ",
    "x = [1, 2, 3]\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden files of the tests.")
    parser.add_argument("--embedded", type=Path, help="directory of the embedded model")
    arguments = parser.parse_args()
    if arguments.embedded:
        write(GOLDEN / "embedded" / "golden.npz", embedded_golden(arguments.embedded))
        return
    for name, (seed, deviation, fields) in TINY.items():
        make_checkpoint(GOLDEN / name, seed, deviation, fields)
        write(GOLDEN / name / "golden.npz", golden(GOLDEN / name, random_prompts(seed), logits_of=6))


def make_checkpoint(directory: Path, seed: int, deviation: float, fields: dict[str, Any]) -> None:
    """Save a random Llama in Hugging Face layout; norm weights are random too, so that each matters."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, **fields
    )
    model = transformers.LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 1:
                parameter += 1
    for stale in directory.glob("model*"):
        stale.unlink()
    model.save_pretrained(directory, max_shard_size="60KB" if not config.tie_word_embeddings else "1GB")


def random_prompts(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]


def embedded_golden(directory: Path) -> dict[str, np.ndarray]:
    """Goldens of SNIPPETS on the model in `directory`, tokenised with its own tokenizer.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in SNIPPETS]
    return golden(directory, prompts, logits_of=4) | {"texts": np.array(SNIPPETS)}


@torch.inference_mode()
def golden(directory: Path, prompts: list[list[int]], logits_of: int) -> dict[str, np.ndarray]:
    """The arrays described above for `prompts` on the model in `directory`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # Its name in transformers 5.24, and before.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    padded = np.full((len(prompts), max(map(len, prompts))), -1, np.int32)
    tokens = np.zeros((len(prompts), NEW_TOKENS), np.int32)
    gaps = np.zeros((len(prompts), NEW_TOKENS), np.float32)
    first_logits = []
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
        fed, cache = torch.tensor([prompt]), transformers.DynamicCache(config=model.config)
        for step in range(NEW_TOKENS):
            logits = model(fed, use_cache=True, **{named: cache}).logits[0, -1].numpy()
            if step == 0 and row < logits_of:
                first_logits.append(logits.astype(np.float32))
            runner_up, best = np.sort(logits)[-2:]
            tokens[row, step] = logits.argmax()
            gaps[row, step] = best - runner_up
            fed = torch.tensor([[logits.argmax()]])
    return {"prompts": padded, "tokens": tokens, "gaps": gaps, "logits": np.stack(first_logits)}


def write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)
    distinct = [len(set(row)) for row in arrays["tokens"].tolist()]
    print(
        f"{file}: {len(arrays['prompts'])} prompts, smallest gap {arrays['gaps'].min():.5f}, "
        f"largest logit {np.abs(arrays['logits']).max():.1f}, distinct tokens from {min(distinct)}, "
        f"{file.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
