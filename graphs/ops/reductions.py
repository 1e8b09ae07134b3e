"""Reads over the vocabulary axis of `[V, N]`, per column, in two levels: groups of entries, then the entries of one.

XLA:CPU fuses what runs over groups of 64 into one pass (findings/sampler.md). Sums are written out in one order, so
that a column's bits do not depend on the number of columns (`graphs.ops.fixed_order_sums`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_first

GROUP = 64  # vocabulary entries per group


def groups(values: jax.Array, fill: float) -> jax.Array:
    """`[V, N] -> [ceil(V / group), group, N]`, padded with `fill`."""
    count, columns = values.shape
    if missing := -count % GROUP:
        values = jnp.pad(values, ((0, missing), (0, 0)), constant_values=fill)
    return values.reshape(-1, GROUP, columns)


def take_group(grouped: jax.Array, index: jax.Array) -> jax.Array:
    """Group `index [N]` of each column of `grouped [M, group, N]`: `[group, N]`."""
    return jnp.take_along_axis(grouped, index[None, None, :], axis=0)[0]


def argmax(values: jax.Array) -> jax.Array:
    """Index of the largest of `values [V, N]` per column, lowest index on ties, i32 `[N]`.

    Maxima of groups, then the winning group. One argmax over V carries indices through the whole reduction and is
    many times slower on CPU.
    """
    grouped = groups(values, -jnp.inf)
    winner = jnp.argmax(jnp.max(grouped, axis=1), axis=0).astype(jnp.int32)  # [N]
    return winner * GROUP + jnp.argmax(take_group(grouped, winner), axis=0).astype(jnp.int32)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of `values [V, N]` per column, descending, lowest index first on ties.

    Returns values and indices i32, both `[count, N]`; count is at most V.
    """
    return lax.platform_dependent(
        values,
        cpu=functools.partial(_largest_by_sort, count=count),
        default=functools.partial(largest_by_rank, count=count),
    )


def _largest_by_sort(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """They all lie in the `count` groups of largest maxima, so only these are sorted."""
    grouped = groups(values, -jnp.inf)
    if count >= grouped.shape[0]:
        best, index = lax.top_k(values.T, count)
        return best.T, index.T
    _, winners = lax.top_k(jnp.max(grouped, axis=1).T, count)
    winners = jnp.sort(winners, axis=1)  # in order of the vocabulary, for the ties
    columns = grouped.shape[2]
    inside = grouped.transpose(2, 0, 1)[jnp.arange(columns)[:, None], winners]  # [N, count, group]
    best, place = lax.top_k(inside.reshape(columns, -1), count)
    index = jnp.take_along_axis(winners, place // GROUP, axis=1) * GROUP + place % GROUP
    return best.T, index.T


def as_rows(values: jax.Array) -> jax.Array:
    """`values [V, N]` as rows of a whole group, `[ceil(V / group), group * N]`, for exponentials.

    XLA:CPU unrolls an inner loop of up to 8 and then rounds the multiply-adds of its exponential differently, so that
    8 columns would get other bits than 16 (findings/same_bits.md). Undone by `as_columns`.
    """
    grouped = groups(values, 0.0)
    return grouped.reshape(len(grouped), -1)


def per_column(each: jax.Array) -> jax.Array:
    """One value per column, `each [N]`, as `as_rows` has them: `[group * N]`."""
    return lax.optimization_barrier(jnp.tile(each, GROUP))  # read along a row, not by index arithmetic


def as_columns(flattened: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `as_rows` for values of `shape [V, N]`."""
    return lax.optimization_barrier(flattened).reshape(-1, shape[1])[: shape[0]]


def relative(values: jax.Array, peak: jax.Array) -> jax.Array:
    """`exp(values - peak)` of `values [V, N]`, `peak [N]`."""
    return as_columns(jnp.exp(as_rows(values) - per_column(peak)), values.shape)


def total(values: jax.Array) -> jax.Array:
    """Sum of non-negative `values [V, N]` per column, f32 `[N]`: over the groups, then inside."""
    return sum_first(sum_first(groups(values, 0.0)))


def cumulative(values: jax.Array) -> jax.Array:
    """Inclusive cumulative sums down the columns of `values [M, N]`.

    Each sum is added to the sum that ends 1, 2, 4 ... entries above it (Hillis and Steele 1986), in every graph in
    this order.
    """
    count = values.shape[0]
    step = 1
    while step < count:
        shifted = jnp.pad(values[:-step], ((step, 0), (0, 0)))
        values = lax.optimization_barrier(values + shifted)
        step *= 2
    return values


_FEW = 4  # entries of which only the largest is looked at first
_AT_ONCE = 512  # entries that are compared with each other without groups


@functools.partial(jax.jit, static_argnames="count")  # traced once, not in every program of a CPU
def largest_by_rank(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of `values f32 [V, N]` per column, descending, lowest index first on ties.

    Without a sort and without a loop, by counting what is ahead of each: on a GPU, a sort is dozens of passes, and a
    loop inside of a `lax.cond` keeps it out of a CUDA graph, so that the host waits for the device in every step,
    whichever branch is taken (findings/gpu.md).

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
    if size <= max(_AT_ONCE, count * _FEW):
        return _ordered(keys, lax.broadcasted_iota(jnp.int32, keys.shape, 0), count)
    padded = jnp.pad(keys, ((0, -size % _FEW), (0, 0)), constant_values=-(2**31))
    grouped = padded.reshape(-1, _FEW, columns)
    winners = _leaders(jnp.max(grouped, axis=1), count)[:, None]  # [count, 1, N]
    inside = jnp.take_along_axis(grouped, winners, axis=0)
    index = winners * _FEW + jnp.arange(_FEW, dtype=jnp.int32)[:, None]
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
