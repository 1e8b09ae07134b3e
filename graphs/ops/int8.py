"""Weights and activations in eight bits (W8A8): rotated, symmetric, a scale for each `GROUP` neighbours of K.

A product quantises its activations too, each group of a row by its own largest value. Within a group it multiplies
int8 by int8 into int32, which is exact in any order; groups are scaled and added in float32, K ascending. A row's
result is thus a function of the row, and the operand order changes no bit.

Both sides are rotated before, a group at a time: that changes no product and spreads outliers, which would make the
quantisation steps of their whole group larger (Ashkboos et al., "QuaRot", 2024). What each part gains:
findings/int8.md.
"""

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

X = TypeVar("X", np.ndarray, jax.Array)
SUFFIX = "_scale"  # of the leaf that belongs to a quantised one
GROUP = 64  # neighbours of K that share a scale, and are rotated together (findings/int8.md)
_LARGEST = np.float32(127)
_LEAST = 1e-30  # groups of activations whose largest value is smaller are zero
_SCALE_BITS = np.uint32(0xFFFFFF00)  # scales of activations have sixteen bits (`native/grouped_dots.h`)


class Quantized(NamedTuple):
    """values: int8 `[..., F, D]`. scale: bfloat16 `[..., F, D / GROUP]`. The rotated weight is their product."""

    values: jax.Array
    scale: jax.Array


def groups_of(width: int) -> int:
    """Groups of a row; the last one may be shorter."""
    return -(-width // GROUP)


def rotated(x: X, axis: int) -> X:
    """The Hadamard transform, its own inverse, of each whole group of `x`, float32, along `axis`; the rest stays."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    whole = x.shape[axis] // GROUP * GROUP
    turned, rest = xp.split(x, [whole], axis)
    distance = GROUP // 2
    while distance:
        pairs = turned.reshape(*x.shape[:axis], -1, 2, distance, *x.shape[axis + 1 :])
        one, other = (xp.squeeze(each, axis + 1) for each in xp.split(pairs, 2, axis + 1))
        turned = xp.stack([one + other, one - other], axis + 1)
        distance //= 2
    turned = turned.reshape(*x.shape[:axis], whole, *x.shape[axis + 1 :]) * np.float32(1 / math.sqrt(GROUP))
    found: X = xp.concatenate([turned, rest], axis)
    return found


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and bfloat16 scales of `weight [..., F, D]`, see `Quantized`; a group of zeros has scale 1."""
    *outer, width = weight.shape
    values = np.zeros((*outer, groups_of(width) * GROUP), np.int8)
    scales = np.empty((*outer, groups_of(width)), jnp.dtype(jnp.bfloat16))
    grouped, flat = values.reshape(-1, groups_of(width), GROUP), weight.reshape(-1, width)
    for first in range(0, len(flat), 4096):  # a block of rows in float32 at a time
        rows = np.zeros((len(flat[first : first + 4096]), groups_of(width) * GROUP), np.float32)
        rows[:, :width] = rotated(flat[first : first + 4096].astype(np.float32), 1)
        steps = rows.reshape(-1, groups_of(width), GROUP)
        largest = np.abs(steps).max(axis=2)
        scale = np.where(largest > 0, largest / _LARGEST, np.float32(1)).astype(jnp.dtype(jnp.bfloat16))
        scales.reshape(-1, groups_of(width))[first : first + 4096] = scale
        steps = np.rint(steps / scale.astype(np.float32)[:, :, None])
        grouped[first : first + 4096] = np.clip(steps, -_LARGEST, _LARGEST)
    return np.ascontiguousarray(values[..., :width]), scales


def quantize_rows(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 values of `x [N, D]` or `[D, N]` and a float32 scale for each group, `[N, G]` or `[G, N]`; `axis` is D's.

    Rotated, multiplied by the inverse of the scale, and rounded to nearest, ties to even: `native/grouped_dots.h`
    does the same, to the bit. A NaN in a group makes its scale NaN, and so all results of the row.
    """
    width, shape = x.shape[axis], list(x.shape)
    shape[axis : axis + 1] = groups_of(width), GROUP
    padding = [(0, 0), (0, 0)]
    padding[axis] = 0, -width % GROUP
    # Else the compiler may round a product and a sum of the rotation as one, in one program and not in another.
    x = rotated(lax.optimization_barrier(x.astype(jnp.float32)), axis)
    grouped = jnp.pad(x, padding).reshape(shape)
    largest = jnp.maximum(jnp.max(jnp.abs(grouped), axis=axis + 1, keepdims=True), _LEAST)
    bits = lax.bitcast_convert_type(largest * np.float32(1 / 127), jnp.uint32) & _SCALE_BITS
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    values = jnp.round(grouped * (1 / scale)).astype(jnp.int8)
    shape[axis : axis + 2] = [groups_of(width) * GROUP]
    return lax.slice_in_dim(values.reshape(shape), 0, width, axis=axis), jnp.squeeze(scale, axis + 1)


def grouped_product(weight: Quantized, x: jax.Array, axis: int, *, weight_left: bool) -> jax.Array:
    """`weight [F, D]` times `x [N, D]` or `[D, N]`, whose D is `axis`; float32.

    weight_left: whether weights are the left operand of each product, and the result is `[F, N]` or `[N, F]`.
    """
    values, scale = quantize_rows(x, axis)
    count, width = x.shape[1 - axis], x.shape[axis]

    def add(group: jax.Array | int, size: int, sums: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(values, group * GROUP, size, axis)
        block = lax.dynamic_slice_in_dim(weight.values, group * GROUP, size, 1)
        of_rows = lax.dynamic_index_in_dim(scale, group, axis, keepdims=False)
        of_features = lax.dynamic_index_in_dim(weight.scale, group, 1, keepdims=False).astype(jnp.float32)
        left, right, axes = (block, rows, (1, axis)) if weight_left else (rows, block, (axis, 1))
        exact = lax.dot_general(
            left, right, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.int32
        ).astype(jnp.float32)
        if weight_left:
            return sums + exact * of_rows * of_features[:, None]
        return sums + exact * of_rows[:, None] * of_features

    features = len(weight.values)
    sums = jnp.zeros((features, count) if weight_left else (count, features), jnp.float32)
    whole, rest = divmod(width, GROUP)
    if whole:
        sums = lax.fori_loop(0, whole, lambda group, sums: add(group, GROUP, sums), sums)
    return add(whole, rest, sums) if rest else sums


def dequantized(values: jax.Array, scale: jax.Array) -> jax.Array:
    """The weights `[N, D]` that `values [N, D]` and `scale [N, D / GROUP]` stand for, float32."""
    steps = jnp.repeat(scale.astype(jnp.float32), GROUP, axis=1)[:, : values.shape[1]]
    # The compiler may round such a product and the sum behind it as one, in one program and not in another
    # (findings/many_devices.md).
    return lax.optimization_barrier(rotated(lax.optimization_barrier(values.astype(jnp.float32) * steps), 1))
