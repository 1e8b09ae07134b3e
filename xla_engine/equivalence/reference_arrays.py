"""Functions of arrays in the independent reference: norms, activations, rotation, attention, recurrent layers."""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_QUERIES = 256  # positions whose scores are in memory at a time


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zhang and Sennrich 2019, over the last axis."""
    out: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight
    return out


def softmax(scores: Array) -> Array:
    exp: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    out: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return out


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    out: Array = (
        0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    )
    return out


def softplus(x: Array) -> Array:
    out: Array = np.logaddexp(x, np.float32(0))
    return out


def capped(x: Array, cap: float | None) -> Array:
    """A soft limit by tanh."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def rotated(x: Array, *, angles: Array, factor: float, adjacent: bool) -> Array:
    """Rotary embedding (Su et al. 2021) of `x [n, heads, width]`, of as many dimensions as there are angles.

    angles: of one position for each pair of dimensions. factor: multiplies sines and cosines. adjacent: pairs are
    dimensions 2i and 2i + 1, else i and i + half.
    """
    count = 2 * len(angles)
    at = np.arange(len(x), dtype=np.float32)[:, None, None] * angles
    cos, sin = np.cos(at) * np.float32(factor), np.sin(at) * np.float32(factor)
    out = x.copy()
    turning = out[..., :count]
    pairs = (
        (turning[..., ::2], turning[..., 1::2]) if adjacent else np.split(turning, 2, axis=-1)
    )  # views of out
    first, second = (each.copy() for each in pairs)
    pairs[0][:], pairs[1][:] = first * cos - second * sin, second * cos + first * sin
    return out


def attend(
    q: Array, k: Array, v: Array, scale: float, window: int | None, cap: float | None, sinks: Array | None
) -> Array:
    """Causal attention of one sequence: `q [n, H, d]`, `k` and `v` `[n, KV, d]` -> `[n, H, d]`.

    window: the most keys that a query sees. sinks: `[H]`, a score without a value in each head's softmax.
    """
    shared = q.shape[1] // k.shape[1]  # consecutive query heads share a key head
    out = np.empty_like(q)
    for first in range(0, len(q), _QUERIES):
        query = np.arange(first, min(first + _QUERIES, len(q)))[:, None]
        key = np.arange(query[-1, 0] + 1)
        hidden = (key > query) | (key <= query - (window or len(q)))
        for head in range(q.shape[1]):
            scores = q[query[:, 0], head] @ k[: len(key), head // shared].T * np.float32(scale)
            scores = np.where(hidden, np.float32(-np.inf), capped(scores, cap))
            if sinks is not None:
                scores = np.concatenate([scores, np.full((len(scores), 1), sinks[head])], axis=1)
            out[query[:, 0], head] = softmax(scores)[:, : len(key)] @ v[: len(key), head // shared]
    return out


def convolved(x: Array, filters: Array) -> Array:
    """Causal convolution of each feature: `x [n, C]` with `filters [C, taps]`."""
    taps = filters.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), x.dtype), x])
    out: Array = sum(padded[tap : tap + len(x)] * filters[:, tap] for tap in range(taps))  # type: ignore[assignment]
    return out


def unit(x: Array) -> Array:
    """Vectors of length one."""
    out: Array = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(1e-6))
    return out


def delta_rule(q: Array, k: Array, v: Array, decay: Array, rate: Array) -> Array:
    """A memory per head that corrects what it recalls. q, k, v: `[n, H, d]`. rate: `[n, H]`. decay:
    `[n, H, 1]`, or of each channel of a key."""
    memory = np.zeros((q.shape[1], q.shape[2], v.shape[2]), np.float32)
    out = np.empty_like(v)
    for at in range(len(q)):
        memory *= decay[at][:, :, None]
        recalled = np.einsum("hkv,hk->hv", memory, k[at])
        change = (v[at] - recalled) * rate[at][:, None]
        memory += k[at][:, :, None] * change[:, None, :]
        out[at] = np.einsum("hkv,hk->hv", memory, q[at])
    return out


def of_best_groups(scores: Array, count: int, chosen: int, best: int) -> Array:
    """`scores [N, E]`, and minus infinity for experts outside the `chosen` best of `count` groups of neighbours.

    A group is as good as the sum of its `best` highest scores.
    """
    by_group = scores.reshape(len(scores), count, -1)
    worth = np.sort(by_group, axis=2)[:, :, -best:].sum(axis=2)
    kept = np.argsort(-worth, axis=1, kind="stable")[:, :chosen, None]
    found = np.full_like(by_group, -np.inf)
    np.put_along_axis(found, kept, np.take_along_axis(by_group, kept, axis=1), axis=1)
    return found.reshape(scores.shape)
