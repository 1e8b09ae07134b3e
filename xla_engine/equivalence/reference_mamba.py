"""The reference's Mamba-2 layers (Dao and Gu 2024), one position after the other, and what their families name."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xla_engine.equivalence.reference_arrays import (
    convolved,
    of_best_groups,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    softplus,
)
from xla_engine.equivalence.reference_files import Array, ReferenceFiles
from xla_engine.equivalence.reference_rotary import Config

MAMBA = ("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2")
_NAMES = {  # of heads, their size, groups, and the size of the state
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "falcon_h1": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size"),
}


def layer_count(c: Config) -> int:
    """Nemotron-H's files may only list the types of its layers."""
    types = c.get("layers_block_type") or c.get("hybrid_override_pattern") or ()
    return int(c.get("num_hidden_layers") or len(types))


class Parts(NamedTuple):
    """What the reference's layers are made of: products with a weight, norms and attention, by name and by layer."""

    files: ReferenceFiles
    linear: Callable[[Array, str], Array]
    norm: Callable[[Array, str], Array]
    attention: Callable[[Array, Array, int], Array]
    eps: float


def mamba(c: Config, parts: Parts, x: Array, ends: Array, name: str) -> Array:
    """A layer's output `[N, D]` for its normalised input. Sequences end before rows `ends`. name: of its module."""
    files, linear, eps = parts.files, parts.linear, parts.eps
    heads, width, groups, size = (int(c[each]) for each in _NAMES[c["model_type"]])
    inner, keys = heads * width, groups * size
    sizes = (inner, inner, keys, keys, heads)
    projected = linear(x * np.float32(c.get("ssm_in_multiplier") or 1), f"{name}in_proj")
    projected = projected * np.repeat(np.asarray(c.get("ssm_multipliers") or [1] * 5, np.float32), sizes)
    gate, mixed, step = np.split(projected, [inner, 2 * inner + 2 * keys], axis=1)
    filters = files.read(f"{name}conv1d").reshape(mixed.shape[1], -1)
    bias = files.read(f"{name}conv1d.bias") if files.has(f"{name}conv1d.bias") else np.float32(0)
    step = softplus(step + files.read(f"{name}dt_bias"))
    limits = c.get("time_step_limit") or (0, np.inf)
    low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    step = np.clip(step, np.float32(low), np.float32(high))
    decay = np.exp(-np.exp(files.read(f"{name}A_log")) * step)
    outs = []
    for inputs, steps, kept in zip(*(np.split(each, ends) for each in (mixed, step, decay)), strict=True):
        v, k, q = np.split(silu(convolved(inputs, filters) + bias), [inner, inner + keys], axis=1)
        k, q = (each.reshape(-1, groups, size).repeat(heads // groups, axis=1) for each in (k, q))
        v = v.reshape(-1, heads, width)
        state, out = np.zeros((heads, size, width), np.float32), np.empty_like(v)
        for at in range(len(v)):
            state = kept[at, :, None, None] * state
            state = state + k[at, :, :, None] * (steps[at, :, None] * v[at])[:, None]
            out[at] = np.einsum("hkv,hk->hv", state, q[at])
        outs.append((out + files.read(f"{name}D")[:, None] * v).reshape(-1, inner))
    y, gate = np.concatenate(outs), silu(gate)
    if not files.has(f"{name}norm"):
        return linear(y * gate, f"{name}out_proj")
    late = c["model_type"] == "falcon_h1" and c.get("mamba_norm_before_gate", True)  # the gate comes behind
    y = (y if late else y * gate).reshape(-1, groups, inner // groups)
    y = rms_norm(y, np.ones(inner // groups, np.float32), eps).reshape(-1, inner) * files.read(f"{name}norm")
    return linear(y * gate if late else y, f"{name}out_proj")


def mamba_layer(c: Config, parts: Parts, x: Array, ends: Array, index: int) -> Array:
    """The residual stream `[N, D]` after a layer of one of these families."""
    name, has = f"layers.{index}.", parts.files.has

    def number(name: str) -> np.float32:
        return np.float32(c.get(name) or 1)

    def mixed(x: Array, module: str) -> Array:
        if not has(f"{name}{module}.A_log"):
            return parts.attention(x, ends, index)
        return mamba(c, parts, x, ends, f"{name}{module}.")

    if c["model_type"] in ("nemotron_h", "mamba2"):  # a layer is one sublayer
        normed = parts.norm(x, f"{name}norm")
        if has(f"{name}mixer.gate"):
            return x + nemotron_experts(c, parts, normed, f"{name}mixer.")
        if not has(f"{name}mixer.up_proj"):
            return x + mixed(normed, "mixer")
        return x + plain_mlp(parts, normed, f"{name}mixer.")
    normed = parts.norm(x, f"{name}input_layernorm")
    if c["model_type"] == "falcon_h1":  # one beside the other
        attended = parts.attention(normed * number("attention_in_multiplier"), ends, index)
        x = x + mixed(normed, "mamba") * number("ssm_out_multiplier")
        x = x + attended * number("attention_out_multiplier")
        normed, part = parts.norm(x, f"{name}pre_ff_layernorm"), f"{name}feed_forward."
        gate, down = c.get("mlp_multipliers") or (1, 1)
        hidden = silu(parts.linear(normed, f"{part}gate_proj") * np.float32(gate))
        hidden = hidden * parts.linear(normed, f"{part}up_proj")
        return x + parts.linear(hidden, f"{part}down_proj") * np.float32(down)
    x = x + mixed(normed, "mamba") * number("residual_multiplier")
    normed = parts.norm(x, f"{name}post_attention_layernorm")
    gate, up = np.split(parts.linear(normed, f"{name}shared_mlp.input_linear"), 2, axis=1)
    out = parts.linear(silu(gate) * up, f"{name}shared_mlp.output_linear")
    if has(f"{name}block_sparse_moe.input_linear"):
        out = out + granite_experts(c, parts, normed, f"{name}block_sparse_moe.")
    return x + out * number("residual_multiplier")


def plain_mlp(parts: Parts, x: Array, name: str) -> Array:
    """An MLP without a gate, with the square of ReLU."""
    hidden = np.square(np.maximum(parts.linear(x, f"{name}up_proj"), 0))
    return parts.linear(hidden, f"{name}down_proj")


def nemotron_experts(c: Config, parts: Parts, x: Array, name: str) -> Array:
    """Nemotron 3's experts, chosen by corrected sigmoids, and a shared one; perhaps between two products."""
    scores, latent = sigmoid(parts.linear(x, f"{name}gate")), parts.files.has(f"{name}fc1_latent_proj")
    corrected = scores + parts.files.read(f"{name}gate.e_score_correction_bias")
    corrected = of_best_groups(corrected, c.get("n_group") or 1, c.get("topk_group") or 1, best=2)
    chosen = np.argsort(-corrected, axis=1, kind="stable")[:, : c.get("num_experts_per_tok") or 2]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if c.get("norm_topk_prob", True):
        weights = weights / weights.sum(axis=1, keepdims=True)
    weights = weights * np.float32(c.get("routed_scaling_factor") or 1)
    given = parts.linear(x, f"{name}fc1_latent_proj") if latent else x
    out = np.zeros_like(given)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        made = plain_mlp(parts, given[rows], f"{name}experts.{expert}.")
        out[rows] += weights[rows, places, None] * made
    out = parts.linear(out, f"{name}fc2_latent_proj") if latent else out
    return out + plain_mlp(parts, x, f"{name}shared_experts.")


def granite_experts(c: Config, parts: Parts, x: Array, name: str) -> Array:
    """Granite's experts, which are stacked; weights are a softmax over the chosen."""
    scores, out = parts.linear(x, f"{name}router.layer"), np.zeros_like(x)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : c["num_experts_per_tok"]]
    weights = softmax(np.take_along_axis(scores, chosen, axis=1))
    first, second = parts.files.read(f"{name}input_linear"), parts.files.read(f"{name}output_linear")
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        gate, up = np.split(x[rows] @ first[expert].T, 2, axis=1)
        out[rows] += weights[rows, places, None] * ((silu(gate) * up) @ second[expert].T)
    return out
