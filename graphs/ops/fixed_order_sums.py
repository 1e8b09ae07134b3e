"""Sums in an order that never changes.

XLA:CPU picks the order of a reduction by the size of the whole array: the same row summed among 64 and among 128 rows
may differ in the last bit (findings/same_bits.md). Additions written out one by one keep their order in every graph.

Elsewhere XLA's own reduction is taken: on a GPU the written-out form is two kernels more per sum, and graphs of
different sizes differ in the bits of their products anyway, so that only one graph has to give a row the same bits.
"""

import jax
import jax.numpy as jnp
from jax import lax


def sum_last(values: jax.Array) -> jax.Array:
    """Sum over the last axis, which is kept with size 1: halves are added while they are even, the rest in order."""
    return lax.platform_dependent(values, cpu=_in_order_last, default=_reduce_last)


def sum_first(values: jax.Array) -> jax.Array:
    """Sum over the first axis, which is dropped, in the same manner."""
    return lax.platform_dependent(values, cpu=_in_order_first, default=_reduce_first)


def sum_middle(values: jax.Array) -> jax.Array:
    """Sum over the second of three axes, which is dropped, in the same manner."""
    return lax.platform_dependent(values, cpu=_in_order_middle, default=_reduce_middle)


def _reduce_last(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=-1, keepdims=True)


def _reduce_first(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=0)


def _reduce_middle(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=1)


def _in_order_middle(values: jax.Array) -> jax.Array:
    return _in_order_first(jnp.swapaxes(values, 0, 1))


def _in_order_last(values: jax.Array) -> jax.Array:
    while values.shape[-1] % 2 == 0:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    total = values[..., :1]
    for index in range(1, values.shape[-1]):
        total = total + values[..., index : index + 1]
    return total


def _in_order_first(values: jax.Array) -> jax.Array:
    while len(values) % 2 == 0:
        half = len(values) // 2
        values = values[:half] + values[half:]
    total = values[0]
    for index in range(1, len(values)):
        total = total + values[index]
    return total
