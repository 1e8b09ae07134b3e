"""EAGLE-3 heads on disk, and what one guesses by NumPy: written from the paper's section 3 and the tensors' names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
THETA, EPS = 5000.0, 1e-5
Array = np.ndarray[Any, Any]


def head_config(model: ModelConfig, known: int, **fields: Any) -> dict[str, Any]:
    """config.json of a head for a model, with a draft vocabulary of the given size."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "draft_vocab_size": known,
        "hidden_size": model.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        **fields,
    }


def head_tensors(config: dict[str, Any], seen: int, layer: str = "midlayer.") -> dict[str, Array]:
    """Random tensors of such a head, which sees so many features; norms are far from one."""
    size, width, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, seen),
        "norm.weight": (size,),
        "lm_head.weight": (config["draft_vocab_size"], size),
        layer + "input_layernorm.weight": (size,),
        layer + "hidden_norm.weight": (size,),
        layer + "post_attention_layernorm.weight": (size,),
        layer + "self_attn.q_proj.weight": (queries, 2 * size),
        layer + "self_attn.k_proj.weight": (keys, 2 * size),
        layer + "self_attn.v_proj.weight": (keys, 2 * size),
        layer + "self_attn.o_proj.weight": (size, queries),
        layer + "mlp.gate_proj.weight": (width, size),
        layer + "mlp.up_proj.weight": (width, size),
        layer + "mlp.down_proj.weight": (size, width),
    }
    draw = np.random.default_rng(3)
    tensors = {
        name: (draw.standard_normal(shape) * (0.2 if len(shape) > 1 else 0.4) + (len(shape) == 1)).astype(
            BF16
        )
        for name, shape in shapes.items()
    }
    # so that tokens count as well
    tensors["fc.weight"] = (tensors["fc.weight"] * BF16.type(0.05)).astype(BF16)
    known = config["draft_vocab_size"]
    if known < vocabulary:
        ids = np.sort(draw.permutation(vocabulary)[:known])
        tensors["d2t"] = ids - np.arange(known)
        tensors["t2d"] = np.isin(np.arange(vocabulary), ids)
    return tensors


def write_head(directory: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ByNumpy:
    """A model and a head in float32, activations rounded to bfloat16 before products. The flags make mistakes.

    taps: layers of the model before which the head sees it; their number is that behind the last. unnormed: the
    embedding has no norm. closed: the next guess takes what stands behind the last norm. same_token: the token
    at a position stands beside what the model made of this position, not the one behind it.
    """

    model: Checkpoint
    head: Path
    taps: tuple[int, ...]
    unnormed: bool = False
    closed: bool = False
    same_token: bool = False

    def guesses(self, streams: Sequence[Array], tokens: Sequence[int], count: int) -> list[int]:
        """The most likely tokens behind `tokens`, one behind the other, by the head.

        streams: of these tokens at least, and possibly more.
        """
        head = {name: as_float(leaf) for name, leaf in load_file(self.head / "model.safetensors").items()}
        config = json.loads((self.head / "config.json").read_text())
        known = len(head["lm_head.weight"])
        ids = np.arange(known) + head.get("d2t", np.zeros(known)).astype(int)
        seen = np.concatenate([streams[tap][: len(tokens) - 1] for tap in self.taps], axis=1)
        before = linear(head["fc.weight"], seen)
        follow, found = list(tokens[:-1] if self.same_token else tokens[1:]), list[int]()
        embed = head.get("embed_tokens.weight", as_float(self.model.weights["embed"]))
        for _ in range(count):
            x = self._layer(head, config, before, embed[follow])
            behind = normed(x[-1:], head["norm.weight"])
            found.append(int(ids[np.argmax(linear(head["lm_head.weight"], behind)[0])]))
            before = np.concatenate([before, behind if self.closed else x[-1:]])
            follow.append(found[-1])
        return found

    def _layer(self, head: dict[str, Array], config: dict[str, Any], before: Array, token: Array) -> Array:
        (layer,) = {name.split("self_attn")[0] for name in head if "q_proj" in name}

        def weight(name: str) -> Array:
            return head[f"{layer}{name}.weight"]

        token = token if self.unnormed else normed(token, weight("input_layernorm"))
        hidden = normed(before, weight("hidden_norm"))
        residual = hidden if config.get("norm_before_residual") else before
        both = np.concatenate([token, hidden], axis=1)
        q, k, v = (linear(weight(f"self_attn.{part}_proj"), both) for part in "qkv")
        dim = config["head_dim"]
        x = residual + linear(weight("self_attn.o_proj"), attention(q, k, v, dim, THETA))
        inner = normed(x, weight("post_attention_layernorm"))
        gate, up = (linear(weight(f"mlp.{part}_proj"), inner) for part in ("gate", "up"))
        return x + linear(weight("mlp.down_proj"), silu(gate) * up)

    def streams(self, tokens: Sequence[int]) -> list[Array]:
        """The model's residual stream before each layer and after the last: `[N, D]` each."""
        config, weights = self.model.config, self.model.weights
        queries, keys = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        found = [as_float(weights["embed"])[list(tokens)]]
        for index in range(config.num_hidden_layers):
            leaf = {
                name: as_float(weights[f"layers.{index}.{name}"])
                for name in ("input_norm", "qkv", "output", "pre_feedforward_norm", "gate_up", "down")
            }
            x = found[-1]
            qkv = linear(leaf["qkv"], normed(x, leaf["input_norm"]))
            q, k, v = np.split(qkv, [queries, queries + keys], axis=1)
            x = x + linear(leaf["output"], attention(q, k, v, config.head_dim, config.rope_theta))
            both = linear(leaf["gate_up"], normed(x, leaf["pre_feedforward_norm"]))
            gate, up = np.split(both, 2, axis=1)
            found.append(x + linear(leaf["down"], silu(gate) * up))
        return found


def as_float(leaf: Array) -> Array:
    return np.asarray(leaf, np.float32)


def rounded(x: Array) -> Array:
    return x.astype(BF16).astype(np.float32)


def linear(weight: Array, x: Array) -> Array:
    return rounded(x) @ weight.T


def normed(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight
    return result


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def attention(q: Array, k: Array, v: Array, dim: int, theta: float) -> Array:
    """Causal, of positions from 0 on; pairs of rotary dimensions are half a head apart."""
    count = len(q)
    angles = np.arange(count)[:, None] * theta ** -(np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x: Array) -> Array:
        one, other = np.split(x.reshape(count, -1, dim), 2, axis=-1)
        return rounded(np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1))

    queries, keys, values = turned(q), turned(k), rounded(v).reshape(count, -1, dim)
    keys, values = (np.repeat(each, queries.shape[1] // each.shape[1], axis=1) for each in (keys, values))
    scores = np.einsum("nhd,mhd->hnm", queries, keys) * dim**-0.5
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, values).reshape(count, -1)
