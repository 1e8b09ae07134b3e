"""Sums in an order that never changes.

XLA picks the order of a reduction by the size of the whole array: the same row summed among 64 and among 128 rows
may differ in the last bit (findings/009). Additions written out one by one keep their order in every graph.
"""

from __future__ import annotations

import jax


def sum_last(values: jax.Array) -> jax.Array:
    """Sum over the last axis, which is kept with size 1: halves are added while they are even, the rest in order."""
    while values.shape[-1] % 2 == 0:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    total = values[..., :1]
    for index in range(1, values.shape[-1]):
        total = total + values[..., index : index + 1]
    return total


def sum_first(values: jax.Array) -> jax.Array:
    """Sum over the first axis, which is dropped, in the same manner."""
    while len(values) % 2 == 0:
        half = len(values) // 2
        values = values[:half] + values[half:]
    total = values[0]
    for index in range(1, len(values)):
        total = total + values[index]
    return total
