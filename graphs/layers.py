"""Row-wise pieces of a decoder layer. Everything here treats each row alone."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from graphs.config import ModelConfig, RopeScaling
from graphs.sums import sum_last


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation of `x [N, D]` in float32 (Zhang and Sennrich 2019)."""
    scale = jax.lax.rsqrt(sum_last(x * x) / x.shape[-1] + eps)  # [N, 1]
    return x * scale * weight


def split_heads(qkv: jax.Array, kv_heads: int, head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a fused projection `[N, (H + 2 KV) Dh]` into q `[N, H, Dh]`, k and v `[N, KV, Dh]`."""
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    queries = heads.shape[1] - 2 * kv_heads
    q, k, v = jnp.split(heads, [queries, queries + kv_heads], axis=1)
    return q, k, v


def apply_rope(x: jax.Array, rope: jax.Array) -> jax.Array:
    """Rotate `x [..., heads, Dh]` by `rope [..., 2, Dh/2]` (cosines, sines); half-split pairs as in Hugging Face."""
    cos, sin = rope[..., None, 0, :], rope[..., None, 1, :]  # [..., 1, Dh/2]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope_table(config: ModelConfig, length: int) -> np.ndarray:
    """Cosines and sines of every position: float32 `[length, 2, Dh/2]`.

    A table rather than in-graph transcendentals: a row's angles are then the same bits in every graph.
    """
    frequencies = inverse_frequencies(config)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotary inverse frequencies, float32 `[Dh/2]` (Su et al. 2021), with the checkpoint's scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (np.float32(1.0) / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    return frequencies if config.rope_scaling is None else _llama3_scaled(frequencies, config.rope_scaling)


def _llama3_scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0).astype(np.float32)  # 1: unscaled, 0: stretched by the whole factor
    return ((1 - keep) * frequencies / np.float32(scaling.factor) + keep * frequencies).astype(np.float32)
