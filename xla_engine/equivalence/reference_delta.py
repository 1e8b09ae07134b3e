"""The reference's gated DeltaNet layers (Yang, Kautz and Hatamizadeh 2024), one position after the other, and Kimi
Delta Attention (Kimi Team 2025), which has a decay for each channel of a key."""

import math
from typing import Any

import numpy as np

from xla_engine.equivalence.reference_arrays import (
    convolved,
    delta_rule,
    rms_norm,
    sigmoid,
    silu,
    softplus,
    unit,
)
from xla_engine.equivalence.reference_files import Array, ReferenceFiles
from xla_engine.equivalence.reference_mamba import Parts
from xla_engine.equivalence.reference_rotary import Config

Sizes = tuple[int, int, int, int]  # key heads, features of each, value heads, features of each


def delta_net(c: Config, parts: Parts, x: Array, ends: Array, index: int) -> Array:
    """A layer's output `[N, D]` for its normalised input. Sequences end before rows `ends`."""
    name, read = f"layers.{index}.linear_attn.", parts.files.read
    mixed, z, b, a = _projected(c, parts, x, name)
    sizes = (
        *(c["linear_num_key_heads"], c["linear_key_head_dim"]),
        *(c["linear_num_value_heads"], c["linear_value_head_dim"]),
    )
    decay = np.exp(-np.exp(read(f"{name}A_log")) * softplus(a + read(f"{name}dt_bias")))  # [N, Hv]
    rate = sigmoid(b) * np.float32(2 if c.get("linear_allow_neg_eigval") else 1)
    out = _recalled(sizes, mixed, _filters(parts.files, name), decay[..., None], rate, ends)
    if c["model_type"] == "olmo_hybrid":
        out = rms_norm(out, read(f"{name}o_norm"), 1e-5)
    else:
        out = rms_norm(out, read(f"{name}norm"), parts.eps)
    out *= silu(z.reshape(out.shape))
    last = "o_proj" if c["model_type"] == "olmo_hybrid" else "out_proj"
    return parts.linear(out.reshape(len(x), -1), name + last)


def kimi_names(c: Config) -> dict[str, Any]:
    """Kimi Linear's configuration in DeepSeek's words; those of others as they are."""
    if c["model_type"] != "kimi_linear":
        return dict(c)
    names = {"num_experts_per_token": "num_experts_per_tok", "moe_renormalize": "norm_topk_prob"}
    names |= {"num_expert_group": "n_group", "model_max_length": "max_position_embeddings"}
    given = {theirs: c[ours] for ours, theirs in names.items() if ours in c}
    usual = {"num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.446}
    return {**usual, **c, **given, "tie_word_embeddings": False}


def kimi_delta(c: Config, parts: Parts, x: Array, ends: Array, index: int) -> Array:
    """As `delta_net`, of Kimi Linear."""
    name, read, linear = f"layers.{index}.self_attn.", parts.files.read, parts.linear
    width = len(read(f"{name}o_norm"))
    heads = len(read(f"{name}dt_bias")) // width
    mixed = np.concatenate([linear(x, f"{name}{part}_proj") for part in "qkv"], axis=1)
    steps = linear(linear(x, f"{name}f_a_proj"), f"{name}f_b_proj") + read(f"{name}dt_bias")
    speed = np.exp(read(f"{name}A_log").reshape(heads, 1))
    decay = np.exp(-speed * softplus(steps.reshape(len(x), heads, width)))  # [N, H, Dk]
    rate = sigmoid(linear(x, f"{name}b_proj"))
    sizes = (heads, width, heads, width)
    out = _recalled(sizes, mixed, _filters(parts.files, name), decay, rate, ends)
    gate = linear(linear(x, f"{name}g_a_proj"), f"{name}g_b_proj")
    out = rms_norm(out, read(f"{name}o_norm"), parts.eps).reshape(gate.shape) * sigmoid(gate)
    return linear(out, f"{name}o_proj")


def _projected(c: Config, parts: Parts, x: Array, name: str) -> tuple[Array, Array, Array, Array]:
    """Queries, keys and values of all heads side by side; gates; rates and steps `[N, Hv]`."""
    linear, keys, values = parts.linear, c["linear_num_key_heads"], c["linear_num_value_heads"]
    if parts.files.has(f"{name}g_proj"):  # OLMo Hybrid: each alone
        q, k, v, z, b, a = (linear(x, f"{name}{part}_proj") for part in "qkvgba")
        return np.concatenate([q, k, v], axis=1), z, b, a
    if not parts.files.has(f"{name}in_proj_qkvz"):
        mixed, z, b, a = (linear(x, f"{name}in_proj_{part}") for part in ("qkv", "z", "b", "a"))
        return mixed, z, b, a
    key_dim, shared = c["linear_key_head_dim"], values // keys  # Qwen3-Next: by key head
    by_head = linear(x, f"{name}in_proj_qkvz").reshape(len(x), keys, -1)
    sizes = np.cumsum([key_dim, key_dim, shared * c["linear_value_head_dim"]])
    q, k, v, z = (part.reshape(len(x), -1) for part in np.split(by_head, sizes, axis=2))
    both = linear(x, f"{name}in_proj_ba").reshape(len(x), keys, 2 * shared)
    b, a = (part.reshape(len(x), values) for part in np.split(both, 2, axis=2))
    return np.concatenate([q, k, v], axis=1), z, b, a


def _filters(files: ReferenceFiles, name: str) -> Array:
    """Of queries, keys and values: `[features, taps]`, the oldest first."""
    if files.has(f"{name}conv1d"):
        found = [files.read(f"{name}conv1d")]
    else:
        found = [files.read(f"{name}{part}_conv1d") for part in "qkv"]
    return np.concatenate([each.reshape(len(each), -1) for each in found])


def _recalled(sizes: Sizes, mixed: Array, filters: Array, decay: Array, rate: Array, ends: Array) -> Array:
    """What the memory of each head recalls at each position, `[N, Hv, Dv]`."""
    keys, key_dim, values, value_dim = sizes
    outs = []
    for inputs, kept, rates in zip(*(np.split(each, ends) for each in (mixed, decay, rate)), strict=True):
        heads = np.split(silu(convolved(inputs, filters)), [keys * key_dim, 2 * keys * key_dim], axis=1)
        query, key = (
            unit(each.reshape(-1, keys, key_dim)).repeat(values // keys, axis=1) for each in heads[:2]
        )
        query = query / np.float32(math.sqrt(key_dim))
        outs.append(delta_rule(query, key, heads[2].reshape(-1, values, value_dim), kept, rates))
    return np.concatenate(outs)
