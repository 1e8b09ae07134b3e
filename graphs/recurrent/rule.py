"""The rule of recurrent layers in pure JAX: a memory per head that takes in one position after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.reductions import cumulative
from xla_engine.graphs.row_state.rows import Extents


class Heads(NamedTuple):
    """The inputs of the rule for N positions, float32. That of Mamba-2 does not correct, and its rates are steps.

    q, k: `[N, Hk, Dk]`, normalised, q also scaled. v: `[N, Hv, Dv]`. rate: `[N, Hv]`, in (0, 2).
    log_decay: `[N, Hv, 1]`, or of each channel of a key `[N, Hv, Dk]`; at most 0. Consecutive value heads share a key
    head.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rate: jax.Array
    log_decay: jax.Array


# The rule: a memory per head that corrects what it recalls. With key k, value v, decay a and rate b of a position, the
# memory S `[Dk, Dv]` becomes `a S + k b (v - a S^T k)^T`; the output is `S^T q`. Decode does that for one position.
# In Kimi Delta Attention a is a diagonal matrix, a decay for each channel of the key (arXiv 2510.26692, section 3).
# The rule of Mamba-2 (state space duality, Dao and Gu 2024, arXiv 2405.21060) is the same without the correction,
# `a S + k b v^T`: b is the step, k and q are its B and C.
# Prefill in pure JAX processes `SEGMENT` positions at once in the WY form of the paper (section 3.3): a small
# triangular system solves the interactions within a segment, and segments run one after the other. Segments begin at
# multiples of `SEGMENT` from the start of a lane. If chunks are multiples of it, a prompt is cut at the same positions
# however it is distributed over lanes and calls. The C++ kernel (`graphs.recurrent.native`) processes positions one by
# one in either case, so that prefill gives the bits of decode.

SEGMENT = 16  # positions that prefill processes at once


def step_rule(
    memory: jax.Array, heads: Heads, *, live: jax.Array, corrects: bool
) -> tuple[jax.Array, jax.Array]:
    """One position of every live row: the new memory `[B, Hv, Dk, Dv]`, and the outputs `[B, Hv, Dv]`."""
    q, k, v, rate, log_decay = _repeated(heads)
    decay = _exponential(log_decay)  # of a head, it may as well stand behind the products with the memory
    within, behind = (decay[..., None], 1) if decay.shape[-1] > 1 else (1, decay)
    asked = jnp.stack([k, q], axis=-1) * within
    recalled, read = jnp.moveaxis(_product("bhkv,bhkj->bhvj", memory, asked), -1, 0)
    change = (v - behind * recalled if corrects else v) * rate[..., None]
    out = behind * read + sum_last(k * q) * change
    after = decay[..., None] * memory + k[..., None] * change[..., None, :]
    return jnp.where(live[:, None, None, None], after, memory), out


def lane_rule(
    memory: jax.Array, heads: Heads, lanes: Extents, *, corrects: bool
) -> tuple[jax.Array, jax.Array]:
    """Up to T positions of each lane, N = P T: the new memory, and the outputs `[N, Hv, Dv]`."""
    slot, start, count = lanes
    number, width = slot.shape[0], heads.v.shape[0] // slot.shape[0]
    used = jnp.arange(width, dtype=jnp.int32) < count[:, None]  # [P, T]

    def segments(x: jax.Array) -> jax.Array:
        """`[P T, Hv, ...]`, zero where unused, as `[G, Hv, SEGMENT, ...]`."""
        x = x.reshape(number, width, *x.shape[1:])
        x = jnp.where(used.reshape(number, width, *(1,) * (x.ndim - 2)), x, 0)
        x = jnp.pad(x, ((0, 0), (0, -width % SEGMENT), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(-1, SEGMENT, *x.shape[2:]).swapaxes(1, 2)

    per_lane = -(-width // SEGMENT)
    first = jnp.arange(per_lane, dtype=jnp.int32) * SEGMENT
    memory, out = _follow(
        memory,
        Heads(*(segments(x) for x in _repeated(heads))),
        slot=jnp.repeat(slot, per_lane),
        fresh=((start == 0)[:, None] & (first == 0)).reshape(-1),
        used=(count[:, None] > first).reshape(-1),
        corrects=corrects,
    )  # [G, Hv, SEGMENT, Dv]
    by_lane = out.swapaxes(1, 2).reshape(number, per_lane * SEGMENT, *out.shape[1::2])
    return memory, by_lane[:, :width].reshape(number * width, *out.shape[1::2])


def _repeated(heads: Heads) -> Heads:
    """Repeat the key heads, so that each value head has its own."""
    times = heads.v.shape[1] // heads.k.shape[1]
    q, k = (jnp.repeat(x, times, axis=1) for x in (heads.q, heads.k))
    return heads._replace(q=q, k=k)


def _follow(
    memory: jax.Array, heads: Heads, *, slot: jax.Array, fresh: jax.Array, used: jax.Array, corrects: bool
) -> tuple[jax.Array, jax.Array]:
    """Run segments `[G, Hv, SEGMENT, ...]` one after the other on the memory of their slots.

    With c the cumulative log decays in a segment, the changes X of its positions solve `(I + A) X = b (v - e^c k S)`,
    where `A[i, j] = b[i] e^(c[i] - c[j]) k[i] k[j]` below the diagonal and S is the memory before the segment; without
    correction they are `b v`. With a decay for each channel, `e^(c[i] - c[j])` stands within the product of the keys.
    Returns the memory and the outputs `[G, Hv, SEGMENT, Dv]`.
    """
    q, k, v, rate, log_decay = heads
    by_segment = jnp.moveaxis(log_decay, 2, 0)
    total = cumulative(by_segment.reshape(SEGMENT, -1)).reshape(by_segment.shape)
    total = jnp.moveaxis(total, 0, 2)  # [G, Hv, SEGMENT, 1 or Dk]
    earlier = jnp.tril(jnp.ones((SEGMENT, SEGMENT), bool))
    pair: jax.Array | int
    if total.shape[-1] > 1:
        pair, (keys, within) = 1, lax.map(_decayed_products, (k, q, total))
    else:
        pair = jnp.exp(jnp.where(earlier, total - total[..., None, :, 0], -jnp.inf))
        keys, within = (_product("ghik,ghjk->ghij", x, k) for x in (k, q))
    since = _exponential(total)
    wanted, asked = rate[..., None] * v, q * since
    if corrects:
        system = rate[..., None] * keys * pair
        inverse = _unit_lower_inverse(system)
        wanted = _product("ghij,ghjv->ghiv", inverse, wanted)
        recall = _product("ghij,ghjk->ghik", inverse, rate[..., None] * k * since)
        asked = jnp.concatenate([recall, asked], axis=2)  # [G, Hv, 2 SEGMENT, Dk]
    within = within * pair
    left = k * _exponential(total[..., -1:, :] - total)  # keys as the segment's end sees them

    def one(memory: jax.Array, segment: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        asked, wanted, within, left, end, slot, fresh, used = segment
        kept = memory[slot]
        before = jnp.where(fresh, 0, kept)
        read, change = _product("hik,hkv->hiv", asked, before), wanted
        if corrects:
            recalled, read = jnp.split(read, 2, axis=1)
            change = wanted - recalled
        out = read + _product("hij,hjv->hiv", within, change)
        after = end[..., None] * before + _product("hik,hiv->hkv", left, change)
        return memory.at[slot].set(jnp.where(used, after, kept)), out

    end = _exponential(total[..., -1, :])
    return lax.scan(one, memory, (asked, wanted, within, left, end, slot, fresh, used))


def _decayed_products(segment: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """For keys, queries and cumulative log decays `[Hv, SEGMENT, Dk]`, the products of keys and of queries i with keys
    j up to i, of which each channel is multiplied by `e^(c[i] - c[j])`: `[Hv, SEGMENT, SEGMENT]`.

    The differences are at most 0. Products with the exponential of either alone would overflow.
    """
    k, q, total = segment
    earlier = jnp.tril(jnp.ones((SEGMENT, SEGMENT), bool))[:, :, None]
    decays = jnp.exp(jnp.where(earlier, total[:, :, None] - total[:, None], -jnp.inf))
    seen = k[:, None] * decays  # [Hv, i, j, Dk]
    return sum_last(k[:, :, None] * seen)[..., 0], sum_last(q[:, :, None] * seen)[..., 0]


def _exponential(x: jax.Array) -> jax.Array:
    """Of `x [..., C]`. XLA:CPU rounds those of rows of one number differently, so that these are a row together."""
    return jnp.exp(x[..., 0])[..., None] if x.shape[-1] == 1 else jnp.exp(x)


def _unit_lower_inverse(system: jax.Array) -> jax.Array:
    """Inverse of I plus the part of `system [..., C, C]` below the diagonal, by forward substitution, row by row."""
    size = system.shape[-1]
    identity = jnp.eye(size, dtype=system.dtype)
    rows = [jnp.broadcast_to(identity[0], system.shape[:-1])]
    for index in range(1, size):
        total = identity[index]
        for earlier in range(index):
            total = total - system[..., index, earlier, None] * rows[earlier]
        rows.append(lax.optimization_barrier(total))  # otherwise each row is recomputed for every later one
    return jnp.stack(rows, axis=-2)


def _product(terms: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(terms, left, right, precision=lax.Precision.HIGHEST)
