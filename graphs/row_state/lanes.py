"""Where lanes lie in the slots, and how rows are written."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Extents(NamedTuple):
    """Lane p holds positions `start[p] .. start[p] + size[p]` of slot `slot[p]`; each i32 `[P]`.

    Consecutive lanes may hold consecutive chunks of one prompt. A lane of size 0 is empty.
    """

    slot: jax.Array
    start: jax.Array
    size: jax.Array


def targets(row: jax.Array, wanted: jax.Array, rows: int) -> jax.Array:
    """Where to `put` what is `wanted`, at `row` of so many; the rest aims at distinct rows out of bounds, so that
    indices stay unique."""
    return jnp.where(wanted, row, rows + jnp.arange(wanted.size, dtype=jnp.int32).reshape(wanted.shape))


def put(leaf: jax.Array, target: jax.Array, new: jax.Array) -> jax.Array:
    """`leaf [B, ...]` with `new [P, ...]` in the rows `target [P]`, as `targets` gives them."""
    return leaf.at[target].set(new, mode="drop", unique_indices=True)
