"""Gated DeltaNet layers (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): linear attention with a state per slot.

A slot keeps, whatever its length, one matrix per value head and the last inputs of a short convolution. With key k,
value v, decay a and rate b of one position the matrix S `[Dk, Dv]` becomes `a S + k b (v - a S^T k)^T`; the output is
`S^T q`. Decode does that for one position. Prefill takes `SEGMENT` positions at once in the WY form of the paper
(section 3.3): what positions of a segment do to each other is a small triangular system, and only whole segments
follow one another. Segments begin at multiples of `SEGMENT` from the start of a lane: where chunks are its multiples,
a prompt is cut at the same positions however it falls into lanes and calls.

All of it is float32 and row-wise. State is written like keys and values: a row that is not live and a lane that is
empty change no byte, and what a slot's last owner left is never read, because position 0 starts from zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from graphs.config import DeltaForm
from graphs.layers import rms_norm
from graphs.sums import sum_last
from graphs.vocabulary import cumulative

SEGMENT = 16  # positions that prefill takes at once
_NORM_EPS = 1e-6  # of the unit norm of queries and keys


class DeltaWeights(NamedTuple):
    """Parameters between the two products, all float32.

    convolution: `[mixed features, kernel]`, oldest position first.   norm: `[Dv]`.
    decay, step_bias: `[Hv]`, the checkpoint's A_log and dt_bias.
    """

    convolution: jax.Array
    decay: jax.Array
    step_bias: jax.Array
    norm: jax.Array


class DeltaState(NamedTuple):
    """What a layer keeps of every slot, float32.

    inputs: `[B, kernel - 1, mixed features]`, of the last positions.   memory: `[B, Hv, Dk, Dv]`.
    """

    inputs: jax.Array
    memory: jax.Array


class _Heads(NamedTuple):
    """q, k `[..., Hv, Dk]` of unit length, q scaled; v `[..., Hv, Dv]`; rate in (0, 1), log_decay <= 0 `[..., Hv]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rate: jax.Array
    log_decay: jax.Array


def make_state(form: DeltaForm, rows: int) -> DeltaState:
    """State of `rows` slots, zero."""
    return DeltaState(
        jnp.zeros((rows, form.kernel - 1, form.mixed_features), jnp.float32),
        jnp.zeros((rows, form.value_heads, form.key_dim, form.value_dim), jnp.float32),
    )


def delta_decode(
    form: DeltaForm, weights: DeltaWeights, state: DeltaState, projected: jax.Array, *, live: jax.Array
) -> tuple[DeltaState, jax.Array]:
    """One position of every live row: `projected [B, projected features]` -> `[B, inner features]`, float32."""
    mixed, gates, rate, step = _split(form, projected)
    window = jnp.concatenate([state.inputs, mixed[:, None]], axis=1)  # [B, kernel, features]
    heads = _heads(form, weights, _convolve(window, weights.convolution)[:, 0], rate, step)
    both = jnp.stack([heads.k, heads.q], axis=-1)  # [B, Hv, Dk, 2]
    recalled, read = jnp.moveaxis(_product("bhkv,bhkj->bhvj", state.memory, both), -1, 0)  # [B, Hv, Dv]
    decay = jnp.exp(heads.log_decay)[..., None]
    change = (heads.v - decay * recalled) * heads.rate[..., None]
    out = decay * read + sum_last(heads.k * heads.q) * change
    memory = decay[..., None] * state.memory + heads.k[..., None] * change[..., None, :]
    mine = live[:, None, None]
    state = DeltaState(
        jnp.where(mine, window[:, 1:], state.inputs),
        jnp.where(mine[..., None], memory, state.memory),
    )
    return state, _gated(form, weights, out, gates)


def delta_prefill(
    form: DeltaForm,
    weights: DeltaWeights,
    state: DeltaState,
    projected: jax.Array,
    *,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[DeltaState, jax.Array]:
    """Up to T positions of each lane: `projected [P T, projected features]` -> `[P T, inner features]`, float32.

    `slot`, `start`, `count` `[P]` as in `graphs.attention.Attention.attend_prefill`: consecutive lanes may hold
    consecutive chunks of one prompt. A lane that starts at 0 starts from zeros.
    """
    lanes, width = slot.shape[0], projected.shape[0] // slot.shape[0]
    mixed, gates, rate, step = _split(form, projected)
    inputs, window = _windows(state.inputs, mixed.reshape(lanes, width, -1), slot, start, count)
    convolved = _convolve(window, weights.convolution).reshape(lanes * width, -1)
    heads = _heads(form, weights, convolved, rate, step)
    used = jnp.arange(width, dtype=jnp.int32) < count[:, None]  # [P, T]

    def segments(x: jax.Array) -> jax.Array:
        """`[P T, Hv, ...]`, zero where unused, as `[G, Hv, SEGMENT, ...]`."""
        x = x.reshape(lanes, width, *x.shape[1:])
        x = jnp.where(used.reshape(lanes, width, *(1,) * (x.ndim - 2)), x, 0)
        x = jnp.pad(x, ((0, 0), (0, -width % SEGMENT), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(-1, SEGMENT, *x.shape[2:]).swapaxes(1, 2)

    per_lane = -(-width // SEGMENT)
    first = jnp.arange(per_lane, dtype=jnp.int32) * SEGMENT
    memory, out = _follow(
        state.memory,
        _Heads(*(segments(x) for x in heads)),
        slot=jnp.repeat(slot, per_lane),
        fresh=((start == 0)[:, None] & (first == 0)).reshape(-1),
        used=(count[:, None] > first).reshape(-1),
    )  # [G, Hv, SEGMENT, Dv]
    by_lane = out.swapaxes(1, 2).reshape(lanes, per_lane * SEGMENT, *out.shape[1::2])
    by_row = by_lane[:, :width].reshape(lanes * width, *out.shape[1::2])
    return DeltaState(inputs, memory), _gated(form, weights, by_row, gates)


def _split(form: DeltaForm, projected: jax.Array) -> list[jax.Array]:
    """The parts of a projection: what is convolved, gates, rates, decay steps."""
    ends = (form.mixed_features, form.mixed_features + form.inner_features)
    return jnp.split(projected, [*ends, ends[1] + form.value_heads], axis=-1)


def _convolve(window: jax.Array, weight: jax.Array) -> jax.Array:
    """Causal convolution of each feature, then SiLU: `[N, kernel - 1 + T, C]`, `[C, kernel]` -> `[N, T, C]`."""
    kernel = weight.shape[1]
    width = window.shape[1] - kernel + 1
    total = window[:, :width] * weight[:, 0]
    for index in range(1, kernel):
        total = total + window[:, index : index + width] * weight[:, index]
    return jax.nn.silu(total)


def _windows(
    kept: jax.Array, mixed: jax.Array, slot: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Inputs `mixed [P, T, C]` behind those that came before them, `[P, kernel - 1 + T, C]`, and what slots keep then.

    Lane after lane, as a lane may go on where the one before it ended.
    """

    def one(kept: jax.Array, lane: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        mixed, slot, start, count = lane
        before = jnp.where(start == 0, 0, kept[slot])
        window = jnp.concatenate([before, mixed])
        behind = lax.dynamic_slice_in_dim(window, count, len(before))
        return kept.at[slot].set(jnp.where(count > 0, behind, kept[slot])), window

    return lax.scan(one, kept, (mixed, slot, start, count))


def _heads(
    form: DeltaForm, weights: DeltaWeights, convolved: jax.Array, rate: jax.Array, step: jax.Array
) -> _Heads:
    """Heads of `convolved [N, mixed features]`, `rate` and `step` `[N, Hv]`."""
    keys = form.key_heads * form.key_dim
    q, k, v = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    q, k = (_unit(x.reshape(-1, form.key_heads, form.key_dim)) for x in (q, k))
    q, k = (jnp.repeat(x, form.value_heads // form.key_heads, axis=1) for x in (q, k))
    return _Heads(
        q * form.key_dim**-0.5,
        k,
        v.reshape(-1, form.value_heads, form.value_dim),
        jax.nn.sigmoid(rate),
        -jnp.exp(weights.decay) * jax.nn.softplus(step + weights.step_bias),
    )


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(sum_last(x * x) + _NORM_EPS)


def _gated(form: DeltaForm, weights: DeltaWeights, out: jax.Array, gates: jax.Array) -> jax.Array:
    """Each head of `out [N, Hv, Dv]` normalised and gated: `[N, inner features]`."""
    return rms_norm(out, weights.norm, form.norm_eps).reshape(gates.shape) * jax.nn.silu(gates)


def _follow(
    memory: jax.Array, heads: _Heads, *, slot: jax.Array, fresh: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run segments `[G, Hv, SEGMENT, ...]` one after the other on the memory of their slots.

    With decays summed up inside a segment to c, the changes X of its positions solve `(I + A) X = b (v - e^c k S)`,
    where `A[i, j] = b[i] e^(c[i] - c[j]) k[i] k[j]` below the diagonal and S is the memory before the segment.
    Returns the memory and the outputs `[G, Hv, SEGMENT, Dv]`.
    """
    q, k, v, rate, log_decay = heads
    flat = jnp.moveaxis(log_decay, -1, 0).reshape(SEGMENT, -1)
    total = jnp.moveaxis(cumulative(flat).reshape(SEGMENT, *log_decay.shape[:-1]), 0, -1)  # [G, Hv, SEGMENT]
    earlier = jnp.tril(jnp.ones((SEGMENT, SEGMENT), bool))
    pair = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = rate[..., None] * _product("ghik,ghjk->ghij", k, k) * pair
    inverse = _unit_lower_inverse(system)
    since = jnp.exp(total)[..., None]
    wanted = _product("ghij,ghjv->ghiv", inverse, rate[..., None] * v)
    recall = _product("ghij,ghjk->ghik", inverse, rate[..., None] * k * since)
    within = _product("ghik,ghjk->ghij", q, k) * pair
    left = k * jnp.exp(total[..., -1:] - total)[..., None]  # keys as the segment's end sees them

    def one(memory: jax.Array, segment: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        asked, wanted, within, left, end, slot, fresh, used = segment
        kept = memory[slot]
        before = jnp.where(fresh, 0, kept)
        recalled, read = jnp.split(_product("hik,hkv->hiv", asked, before), 2, axis=1)
        change = wanted - recalled
        out = read + _product("hij,hjv->hiv", within, change)
        after = end[:, None, None] * before + _product("hik,hiv->hkv", left, change)
        return memory.at[slot].set(jnp.where(used, after, kept)), out

    asked = jnp.concatenate([recall, q * since], axis=2)  # [G, Hv, 2 SEGMENT, Dk]
    return lax.scan(one, memory, (asked, wanted, within, left, jnp.exp(total[..., -1]), slot, fresh, used))


def _unit_lower_inverse(system: jax.Array) -> jax.Array:
    """Inverse of I plus the part of `system [..., C, C]` below the diagonal, by forward substitution, row by row."""
    size = system.shape[-1]
    identity = jnp.eye(size, dtype=system.dtype)
    rows = [jnp.broadcast_to(identity[0], system.shape[:-1])]
    for index in range(1, size):
        total = identity[index]
        for earlier in range(index):
            total = total - system[..., index, earlier, None] * rows[earlier]
        rows.append(lax.optimization_barrier(total))  # else each row is computed again for every later one
    return jnp.stack(rows, axis=-2)


def _product(terms: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(terms, left, right, precision=lax.Precision.HIGHEST)
