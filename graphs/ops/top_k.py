"""The largest entries of columns without a sort and without a loop: by counting what is ahead of each.

On a GPU neither is wanted: a sort is dozens of passes, and a loop inside of a `lax.cond` keeps it out of a CUDA graph,
so that the host waits for the device in every step, whichever branch is taken (findings/gpu.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_GROUP = 4  # entries of which only the largest is looked at first
_AT_ONCE = 512  # entries that are compared with each other without groups


@functools.partial(jax.jit, static_argnames="count")  # traced once, not in every program of a CPU
def largest_by_rank(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of `values f32 [V, N]` per column, descending, lowest index first on ties.

    Returns values and indices i32, both `[count, N]`; count is at most V. Order is that of `lax.top_k`, in which -0 is
    less than 0.
    """
    index = _leaders(ordered_bits(values), count)
    return jnp.take_along_axis(values, index, axis=0), index


def _leaders(keys: jax.Array, count: int) -> jax.Array:
    """Indices i32 `[count, N]` of the largest of `keys i32 [V, N]`, in order.

    They lie in the `count` groups of largest maxima, and which these are is the same question of fewer keys.
    """
    size, columns = keys.shape
    if size <= max(_AT_ONCE, count * _GROUP):
        return _ordered(keys, lax.broadcasted_iota(jnp.int32, keys.shape, 0), count)
    padded = jnp.pad(keys, ((0, -size % _GROUP), (0, 0)), constant_values=-(2**31))
    groups = padded.reshape(-1, _GROUP, columns)
    winners = _leaders(jnp.max(groups, axis=1), count)[:, None]  # [count, 1, N]
    inside = jnp.take_along_axis(groups, winners, axis=0)
    index = winners * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)[:, None]
    return _ordered(inside.reshape(-1, columns), index.reshape(-1, columns), count)


def _ordered(keys: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Of entries `keys [M, N]` at distinct `index [M, N]` the indices of the `count` largest, in order."""
    keys, index = lax.optimization_barrier((keys, index))  # else every comparison gathers them again
    ahead = (keys[:, None] > keys) | ((keys[:, None] == keys) & (index[:, None] < index))  # [M, M, N]
    rank = jnp.sum(ahead, axis=0, dtype=jnp.int32)
    place = jnp.arange(count, dtype=jnp.int32)[:, None, None]
    return jnp.sum(jnp.where(rank == place, index, 0), axis=1)


def ordered_bits(values: jax.Array) -> jax.Array:
    """Integers that compare as the floats do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def from_ordered_bits(order: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
