"""The reference's layers with several residual streams (Gemma 3n): alternating updates (Baykal et al. 2023), LAuReL
(Menghani et al. 2024) and MLPs that cut off most gates."""

import math
from statistics import NormalDist

import numpy as np

from xla_engine.equivalence.reference_arrays import gelu_tanh
from xla_engine.equivalence.reference_files import Array
from xla_engine.equivalence.reference_mamba import Parts
from xla_engine.equivalence.reference_rotary import Config


def layer_inputs(c: Config, parts: Parts, tokens: Array, x: Array) -> Array | None:
    """The embeddings of `tokens [N]` for each layer, `[N, layers, P]`, if there are any (Gemma 3n and 4).

    x: their own embeddings, `[N, D]`.
    """
    read, size = parts.files.read, int(c.get("hidden_size_per_layer_input") or 0)
    if not parts.files.has("embed_tokens_per_layer"):
        return None
    made = x @ read("per_layer_model_projection").T / np.float32(math.sqrt(x.shape[1]))
    made = parts.norm(made.reshape(len(x), -1, size), "per_layer_projection_norm")
    table = read("embed_tokens_per_layer")
    found = table[np.where(tokens < len(table), tokens, 0)] * np.float32(math.sqrt(size))
    return np.asarray((made + found.reshape(made.shape)) / np.float32(math.sqrt(2)))


def of_input(parts: Parts, inputs: Array, x: Array, index: int) -> Array:
    """What the embeddings for layer `index`, of all of `inputs`, add to `x [N, D]`."""
    name = f"layers.{index}."
    gate = gelu_tanh(parts.linear(x, f"{name}per_layer_input_gate"))
    out = parts.linear(gate * inputs[:, index], f"{name}per_layer_projection")
    return parts.norm(out, f"{name}post_per_layer_input_norm")


def several(c: Config, parts: Parts, x: Array) -> Array:
    """The streams `[S, N, D]` of embeddings `x [N, D]`."""
    made = [_as_large(x @ _projection(parts, "", at), x) for at in range(_count(c) - 1)]
    return np.stack([x, *made])


def one(c: Config, parts: Parts, x: Array) -> Array:
    """What the final norm sees of the streams `x [S, N, D]`."""
    made = [_as_large(x[at + 1] @ _projection(parts, "unembed_", at), x[0]) for at in range(_count(c) - 1)]
    return np.asarray(np.mean([x[0], *made], axis=0, dtype=np.float32))


def alternating_layer(
    c: Config, parts: Parts, inputs: Array | None, x: Array, ends: Array, index: int
) -> Array:
    """The streams `x [S, N, D]` after layer `index`. Sequences end before rows `ends`. inputs: of `layer_inputs`."""
    assert inputs is not None
    name, linear, norm = f"layers.{index}.", parts.linear, parts.norm
    count = _count(c)
    factors = linear(_routed(parts, x[0], name), f"{name}altup.prediction_coefs").reshape(-1, count, count)
    x = x + np.einsum("nji,ind->jnd", factors, x)
    normed = norm(x[0], f"{name}input_layernorm")
    low = linear(linear(normed, f"{name}laurel.linear_left"), f"{name}laurel.linear_right")
    beside = normed + norm(low, f"{name}laurel.post_laurel_norm")
    mixed = norm(parts.attention(normed, ends, index), f"{name}post_attention_layernorm")
    made = (x[0] + mixed + beside) / np.float32(math.sqrt(2))
    out = _mlp(parts, norm(made, f"{name}pre_feedforward_layernorm"), f"{name}mlp.", _cutoff(c, index))
    made = made + norm(out, f"{name}post_feedforward_layernorm")
    factors = 1 + linear(_routed(parts, made, name), f"{name}altup.correction_coefs")
    x = x + (made - x[0]) * factors.T[:, :, None]
    first = x[0]
    if c.get("altup_correct_scale", True):
        first = first * parts.files.read(f"{name}altup.correct_output_scale")
    x[1:] += of_input(parts, inputs, first, index)
    return x


def _count(c: Config) -> int:
    return int(c.get("altup_num_inputs") or 4)


def _projection(parts: Parts, kind: str, at: int) -> Array:
    """A projection of a stream, turned; GGUF files have all in one."""
    name, read = f"altup_{kind}projections", parts.files.read
    if parts.files.has(f"{name}.{at}"):
        return read(f"{name}.{at}").T
    return np.asarray(read(name)[at].T)


def _as_large(x: Array, like: Array) -> Array:
    """`x [N, D]` with the root mean squares of another's rows."""
    target = np.sqrt((like * like).mean(axis=1, keepdims=True))
    return np.asarray(x * target / np.sqrt(np.maximum((x * x).mean(axis=1, keepdims=True), np.float32(1e-5))))


def _routed(parts: Parts, x: Array, name: str) -> Array:
    """What the router says of `x [N, D]`: `[N, S]`."""
    asked = parts.norm(x, f"{name}altup.router_norm") / np.float32(x.shape[1])
    return np.tanh(parts.linear(asked, f"{name}altup.modality_router"))


def _cutoff(c: Config, index: int) -> float | None:
    """How many standard deviations above the mean gates are cut off; None: none are."""
    if (cutoffs := c.get("activation_sparsity_scale")) is not None:
        return float(cutoffs[index]) if cutoffs[index] > -math.inf else None
    shares = c.get("activation_sparsity_pattern")
    layers = c["num_hidden_layers"]
    share = (0.95 if index < 10 < layers else 0.0) if shares is None else shares[index]
    return NormalDist().inv_cdf(share) if share else None


def _mlp(parts: Parts, x: Array, name: str, cutoff: float | None) -> Array:
    gate = parts.linear(x, f"{name}gate_proj")
    if cutoff is not None:
        least = gate.mean(axis=1, keepdims=True) + gate.std(axis=1, keepdims=True) * np.float32(cutoff)
        gate = np.maximum(gate - least, 0)
    return parts.linear(gelu_tanh(gate) * parts.linear(x, f"{name}up_proj"), f"{name}down_proj")
