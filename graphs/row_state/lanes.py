"""The positions of prefill lanes in slots, and writes to selected rows."""

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
    """The indices for `put`: `row` if `wanted`, otherwise distinct indices out of bounds, so that all are unique.

    rows: the number of rows.
    """
    return jnp.where(wanted, row, rows + jnp.arange(wanted.size, dtype=jnp.int32).reshape(wanted.shape))


def put(leaf: jax.Array, target: jax.Array, new: jax.Array) -> jax.Array:
    """`leaf [B, ...]` with `new [P, ...]` written to the rows `target [P]`, which come from `targets`."""
    return leaf.at[target].set(new, mode="drop", unique_indices=True)
