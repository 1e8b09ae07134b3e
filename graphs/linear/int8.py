"""Weights in eight bits: symmetric, one scale for each row (W8A8).

A product quantises its activations too, each row by its own largest value, multiplies int8 by int8 into int32, which
is exact in any order, and scales the sums once. A row's result is thus a function of the row, and the operand order
changes no bit. Source: Dettmers et al., "LLM.int8()" (2022), section 2.1, vector-wise quantisation without its
outliers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SUFFIX = "_scale"  # of the leaf that belongs to a quantised one
_LARGEST = 127.0
_LEAST = 1e-30  # rows of activations whose largest value is smaller are zero


class Quantized(NamedTuple):
    """values: int8 `[F, D]`. scale: float32 `[F]`. The weight is their product."""

    values: jax.Array
    scale: jax.Array


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 `[F, D]` and scales float32 `[F]` nearest to `weight [F, D]`; a row of zeros has scale 1."""
    values = np.empty(weight.shape, np.int8)
    scales = np.empty(len(weight), np.float32)
    for first in range(0, len(weight), 4096):  # a block of rows in float32 at a time
        rows = weight[first : first + 4096].astype(np.float32)
        largest = np.abs(rows).max(axis=1)
        scale = np.where(largest > 0, largest / np.float32(_LARGEST), np.float32(1))
        values[first : first + 4096] = np.rint(rows / scale[:, None])
        scales[first : first + 4096] = scale
    return values, scales


def quantize_rows(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 values of `x [N, D]` or `[D, N]` and a float32 scale for each row; `axis` is that of D.

    Multiplied by 127 over the row's largest value, and rounded to nearest, ties to even: `native/operand.h` does the
    same, to the bit. NaN in a row makes its scale NaN, and with it all its results.
    """
    x = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True), _LEAST)
    values = jnp.round(x * (_LARGEST / largest)).astype(jnp.int8)
    return values, jnp.squeeze(largest * np.float32(1 / _LARGEST), axis)
