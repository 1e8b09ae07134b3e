"""Rotary embedding as data: a table of cosines and sines per distinct embedding of a model.

A table rather than in-graph transcendentals: a row's angles are then the same bits in every graph.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xla_engine.graphs.config import ModelConfig, Rope, RopeScaling

Array = np.ndarray[Any, Any]


def rope_tables(config: ModelConfig, length: int, *, context_length: int | None = None) -> Array:
    """Cosines and sines of positions `0 .. length` for each of `config.ropes`: float32 `[K, length, 2, Dh/2]`.

    Attention factors are multiplied in. Dimensions that do not turn have cosine 1 and sine 0; they are the last of
    each half (`rotary_order`).
    `context_length`: the longest request, which "dynamic" and "longrope" choose by, never a request's own length;
    None is `length`.
    """
    context_length = context_length or length
    tables = np.zeros((len(config.ropes), length, 2, config.head_dim // 2), np.float32)
    tables[:, :, 0] = 1
    for table, rope in zip(tables, config.ropes, strict=True):
        if rope is None:
            continue
        frequencies = inverse_frequencies(rope, config.rotary_dim, context_length)
        angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
        factor = np.float32(1 if rope.scaling is None else rope.scaling.attention_factor)
        table[:, 0, : len(frequencies)] = np.cos(angles) * factor
        table[:, 1, : len(frequencies)] = np.sin(angles) * factor
    return tables


def rotary_order(config: ModelConfig) -> Array:
    """The checkpoint's dimension at each dimension of a head: `[Dh]`.

    Backends rotate dimensions i and i + Dh/2. A checkpoint that pairs neighbours, or rotates the first `rotary_dim`
    dimensions only, has its query and key rows put in this order at load; scores do not depend on the order.
    """
    pairs = np.arange(config.rotary_dim).reshape((-1, 2) if config.rope_interleaved else (2, -1))
    first, second = pairs.T if config.rope_interleaved else pairs
    rest = np.arange(config.rotary_dim, config.head_dim).reshape(2, -1)
    return np.concatenate([first, rest[0], second, rest[1]])


def inverse_frequencies(rope: Rope, rotary_dim: int, context_length: int) -> Array:
    """Angles per position, float32 `[rotary_dim / 2]` (Su et al. 2021), with the checkpoint's scaling applied."""
    theta, scaling = rope
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    if scaling is not None and scaling.rope_type == "dynamic":
        reach = max(context_length / scaling.original_max_position_embeddings, 1.0)
        theta *= (scaling.factor * reach - (scaling.factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    frequencies: Array = (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        keep: Array = np.zeros_like(frequencies)
    elif scaling.rope_type == "longrope":
        long = context_length > scaling.original_max_position_embeddings
        return frequencies / np.asarray(scaling.long_factor if long else scaling.short_factor, np.float32)
    elif scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        keep = _yarn_ramp(theta, scaling, rotary_dim)
    keep = np.clip(keep, 0.0, 1.0).astype(np.float32)  # 1: unscaled, 0: divided by the whole factor
    return ((1 - keep) * frequencies / np.float32(scaling.factor) + keep * frequencies).astype(np.float32)


def _yarn_ramp(theta: float, scaling: RopeScaling, rotary_dim: int) -> Array:
    """1 up to the dimension that turns `beta_fast` times in the original context, 0 from `beta_slow` turns on."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return 1 - (np.arange(rotary_dim // 2, dtype=np.float32) - low) / (high - low)
