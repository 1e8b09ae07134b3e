"""SmolLM2-135M's shape with random weights, in memory or as a Hugging Face directory that a peer can load too."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from graphs.config import ModelConfig
from xla_engine.checkpoint import random_weights, tensor_sources

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

Weights = dict[str, np.ndarray]


def decisive_weights(config: ModelConfig, *, seed: int = 0, tail: float = 0.5) -> Weights:
    """Random bf16 weights for comparing greedy streams: lively text, and few near-ties.

    Plain normal weights serve badly. A tied head likes the token it was just given, so that every stream soon
    repeats itself; random signs in the last norm undo that, and attention three times as strong makes the context
    count. And the best of 49152 normal logits leads the second by little more than bf16 rounds; stretching each row
    of the embedding by a log-normal factor of deviation `tail` lets fewer tokens compete, with wider gaps.
    """
    weights = random_weights(config, dtype="bfloat16", seed=seed)
    generator = np.random.default_rng([seed, 1])
    stretch = np.exp(tail * generator.standard_normal((config.vocab_size, 1), dtype=np.float32))
    weights["embed"] = (weights["embed"].astype(np.float32) * stretch).astype(ml_dtypes.bfloat16)
    for leaf in weights:
        if leaf.endswith((".qkv", ".output")):
            weights[leaf] = weights[leaf] * ml_dtypes.bfloat16(3)
    weights["final_norm"] = generator.choice(np.float32([-1, 1]), config.hidden_size)
    return weights


def write_checkpoint(config: ModelConfig, weights: Weights, directory: Path) -> None:
    """Write `directory`, all bfloat16, for transformers and `xla_engine.load_checkpoint`; no eos id, no tokenizer."""
    tensors = {}
    for leaf, stacked in tensor_sources(config).items():
        row = 0
        for name, shape in stacked:
            tensors[name] = weights[leaf][row : row + shape[0]].astype(ml_dtypes.bfloat16)
            row += shape[0]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
