"""Checkpoints that pool, as they are published, and what plain numpy computes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.tokenizers import byte_level

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 336,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
Tensors = dict[str, np.ndarray[Any, Any]]


def qwen3_tensors(prefix: str = "model.", labels: int = 0) -> Tensors:
    """Random weights, float32. prefix: of the names; a bare decoder has none. labels: of a classifier."""
    d, head, f = CONFIG["hidden_size"], CONFIG["head_dim"], CONFIG["intermediate_size"]
    q, kv = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    norms = {
        "input_layernorm": d,
        "post_attention_layernorm": d,
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
    }
    draw = np.random.default_rng(5)
    tensors: Tensors = {f"{prefix}embed_tokens.weight": draw.standard_normal((CONFIG["vocab_size"], d))}
    tensors[f"{prefix}norm.weight"] = 1 + 0.2 * draw.standard_normal(d)
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        tensors |= {
            f"{at}{name}.weight": 0.2 * draw.standard_normal(shape) for name, shape in matrices.items()
        }
        tensors |= {
            f"{at}{name}.weight": 1 + 0.2 * draw.standard_normal(size) for name, size in norms.items()
        }
    if labels:
        tensors["score.weight"] = 0.3 * draw.standard_normal((labels, d))
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def write_model(
    directory: Path,
    tensors: Tensors,
    architecture: str,
    *,
    modules: Sequence[str] = (),
    pooling: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A model directory. modules: sentence-transformers' classes in order; pooling: `1_Pooling/config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture], **fields}))
    byte_level().save(str(directory / "tokenizer.json"))
    if modules:
        entries = [
            {
                "idx": index,
                "name": str(index),
                "path": "" if index == 0 else f"{index}_{kind}",
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(modules)
        ]
        (directory / "modules.json").write_text(json.dumps(entries))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    return directory


def hidden_states(tensors: Tensors, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Behind the last norm, by the formulas of the Qwen3 paper's decoder in float64: `[N, D]`."""
    prefix = "model." if "model.norm.weight" in tensors else ""
    weights = {
        name.removeprefix(prefix).removesuffix(".weight"): each.astype(np.float64)
        for name, each in tensors.items()
    }
    head, heads, kv = CONFIG["head_dim"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    count = len(token_ids)
    frequency = CONFIG["rope_theta"] ** (-np.arange(0, head, 2) / head)
    angle = np.arange(count)[:, None] * frequency  # [N, Dh / 2]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weights[name]

    def turn(x: Any) -> Any:
        one, two = x[..., : head // 2], x[..., head // 2 :]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    x = weights["embed_tokens"][list(token_ids)]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"layers.{layer}."
        y = norm(x, f"{at}input_layernorm")
        q, k, v = (
            (y @ weights[f"{at}self_attn.{name}_proj"].T).reshape(count, -1, head) for name in ("q", "k", "v")
        )
        q, k = turn(norm(q, f"{at}self_attn.q_norm")), turn(norm(k, f"{at}self_attn.k_norm"))
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weight, v).reshape(count, -1)
        x = x + mixed @ weights[f"{at}self_attn.o_proj"].T
        y = norm(x, f"{at}post_attention_layernorm")
        gate, up = (y @ weights[f"{at}mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{at}mlp.down_proj"].T
    return norm(x, "norm")
