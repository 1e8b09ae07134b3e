"""Models for the benchmark: real shapes with random weights, written once as Hugging Face directories."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from xla_engine.config import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig, RopeScaling
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.model_loader.families import LLAMA, QWEN3, Family, tensor_sources

SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)
LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    tie_word_embeddings=True,
)
QWEN3_0_6B = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    qk_norm="head",
    tie_word_embeddings=True,
)
SHAPES = {"smollm2-135m": SMOLLM2_135M, "qwen3-0.6b": QWEN3_0_6B, "llama-3.2-1b": LLAMA_3_2_1B}
_WRITTEN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    "tie_word_embeddings",
)
_LLAMA3 = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_RECIPE = 1  # of `decisive_weights`; part of the directory's name

Weights = dict[str, np.ndarray]


def find_model(name: str, cache: Path) -> Path:
    """The directory of "embedded", of a shape in `SHAPES` (written below `cache` on first use), or of a path.

    Raises ConfigError for anything else.
    """
    if name == "embedded":
        return embedded_model_directory()
    if name in SHAPES:
        directory = cache / "models" / f"{name}-random{_RECIPE}"
        if not directory.exists():
            write_once(SHAPES[name], directory)
        return directory
    if (Path(name) / "config.json").exists():
        return Path(name)
    raise ConfigError(
        f"model {name!r} is not known; use embedded, {', '.join(SHAPES)}, or a directory with config.json"
    )


def write_once(config: ModelConfig, directory: Path) -> None:
    """`write_checkpoint` of decisive weights; a run that is cut short leaves no half-written directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        write_checkpoint(config, decisive_weights(config), Path(folder) / "model")
        os.replace(Path(folder) / "model", directory)


def decisive_weights(config: ModelConfig, *, seed: int = 0, tail: float = 0.5) -> Weights:
    """Random bf16 weights for comparing greedy streams: lively text, and few near-ties.

    Plain normal weights do not serve. A tied head prefers the token it was just given, so that every stream soon
    repeats itself; random signs in the last norm undo that, and attention three times as strong makes the context
    count. And the best of many normal logits leads the second by little more than bf16 rounds; stretching each row
    of the embedding by a log-normal factor of deviation `tail` lets fewer tokens compete, with wider gaps.
    """
    weights = random_weights(config, dtype="bfloat16", seed=seed)
    generator = np.random.default_rng([seed, 1])
    stretch = np.exp(tail * generator.standard_normal((config.vocab_size, 1), dtype=np.float32))
    weights["embed"] = (weights["embed"].astype(np.float32) * stretch).astype(ml_dtypes.bfloat16)
    for leaf in weights:
        if leaf.endswith((".qkv", ".output")):
            weights[leaf] = weights[leaf] * ml_dtypes.bfloat16(3)
    weights["final_norm"] = generator.choice(np.array([-1, 1], np.float32), config.hidden_size)
    return weights


def write_checkpoint(config: ModelConfig, weights: Weights, directory: Path) -> None:
    """Write `directory`, all bfloat16, for `load_checkpoint` and every peer; no eos id, no tokenizer."""
    tensors = {}
    for leaf, stacked in tensor_sources(config, _family(config)).items():
        row = 0
        for source in stacked:
            rows = source.shape[0]
            tensors[source.name] = weights[leaf][row : row + rows].astype(ml_dtypes.bfloat16)
            row += rows
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(config, directory)


def write_config(config: ModelConfig, directory: Path) -> None:
    """The config.json of a Llama, or of a Qwen3 if heads are normed."""
    family = _family(config)
    fields = {name: getattr(config, name) for name in _WRITTEN} | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {name: getattr(config.rope_scaling, name) for name in _LLAMA3}
    (directory / "config.json").write_text(json.dumps(fields, indent=2))


def _family(config: ModelConfig) -> Family:
    return QWEN3 if config.qk_norm == "head" else LLAMA
