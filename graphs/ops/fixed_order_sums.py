"""Sums in an order that never changes.

XLA picks the order of a reduction by the size of the whole array: the same row summed among 64 and among 128 rows may
differ in the last bit (findings/same_bits.md). Additions written out one by one keep their order in every graph. On an
NVIDIA GPU these would be many kernels, and on a TPU many operations, so that kernels with one order are used instead
(`graphs.ops.gpu_rows`, `graphs.ops.tpu_rows`).
"""

import functools

import jax
import jax.numpy as jnp

from xla_engine.graphs.target import platform


def sum_last(values: jax.Array) -> jax.Array:
    """Sum over the last axis, which is kept with size 1: halves are added while they are even, the rest in order."""
    if platform() == "cpu":  # Pallas takes a while to import
        return _last_in_order(values)
    if platform() == "tpu":
        from xla_engine.graphs.ops.tpu_rows import tpu_sum_last

        return tpu_sum_last(values)
    from xla_engine.graphs.ops.gpu_rows import gpu_sum_last

    return jax.lax.platform_dependent(values, cuda=gpu_sum_last, default=_last_in_order)


def sum_first(values: jax.Array) -> jax.Array:
    """Sum over the first axis, which is dropped, in the same manner."""
    if platform() == "cpu":
        return _first_in_order(values)
    return sum_middle(values.reshape(1, len(values), -1)).reshape(values.shape[1:])


def sum_middle(values: jax.Array) -> jax.Array:
    """Sum over the second of three axes, which is dropped, in the same manner."""
    if platform() == "cpu":
        return _first_in_order(jnp.swapaxes(values, 0, 1))
    if platform() == "tpu":
        return sum_last(jnp.swapaxes(values, 1, 2))[..., 0]
    from xla_engine.graphs.ops.gpu_rows import gpu_sum_middle

    return jax.lax.platform_dependent(
        values, cuda=gpu_sum_middle, default=lambda values: _first_in_order(jnp.swapaxes(values, 0, 1))
    )


def _last_in_order(values: jax.Array) -> jax.Array:
    while values.shape[-1] % 2 == 0:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    parts = [values[..., index : index + 1] for index in range(values.shape[-1])]
    return functools.reduce(jnp.add, parts)


def _first_in_order(values: jax.Array) -> jax.Array:
    while len(values) % 2 == 0:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return functools.reduce(jnp.add, [values[index] for index in range(len(values))])
