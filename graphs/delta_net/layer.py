"""Gated DeltaNet layers (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): linear attention with a state per slot.

Whatever its length, a slot has one matrix per value head (`graphs.delta_net.rule`) and the last inputs of a short
convolution. All of it is float32 and row-wise. State is written like keys and values: rows that are not live and empty
lanes change no byte, and stale state is never read, because position 0 starts from zeros.

`native` names the instruction set whose C++ library runs the rule (`xla_engine.runner.native_library.build`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.config import DeltaForm
from xla_engine.graphs.delta_net.native import Heads, native_outputs
from xla_engine.graphs.delta_net.rule import lane_rule, step_rule
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import flatly, rms_norm
from xla_engine.graphs.row_state.lanes import Extents, put, targets

_NORM_EPS = 1e-6  # for the L2 norm of queries and keys


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
    """The state of a layer for every slot, float32.

    inputs: `[B, kernel - 1, mixed features]`, the convolution's last inputs.   memory: `[B, Hv, Dk, Dv]`.
    """

    inputs: jax.Array
    memory: jax.Array


def make_state(form: DeltaForm, rows: int) -> DeltaState:
    """Zero state for `rows` slots."""
    return DeltaState(
        jnp.zeros((rows, form.kernel - 1, form.mixed_features), jnp.float32),
        jnp.zeros((rows, form.value_heads, form.key_dim, form.value_dim), jnp.float32),
    )


def delta_decode(
    form: DeltaForm,
    weights: DeltaWeights,
    state: DeltaState,
    projected: jax.Array,
    *,
    live: jax.Array,
    native: str | None = None,
) -> tuple[DeltaState, jax.Array]:
    """One position of every live row: `projected [B, projected features]` -> `[B, inner features]`, float32."""
    mixed, gates, rate, step = _split(form, projected)
    window = jnp.concatenate([state.inputs, mixed[:, None]], axis=1)  # [B, kernel, features]
    heads = _heads(form, weights, _convolve(window, weights.convolution)[:, 0], rate, step)
    memory, out = step_rule(state.memory, heads, live=live, native=native)
    inputs = jnp.where(live[:, None, None], window[:, 1:], state.inputs)
    return DeltaState(inputs, memory), _gated(form, weights, out, gates)


def delta_prefill(
    form: DeltaForm,
    weights: DeltaWeights,
    state: DeltaState,
    projected: jax.Array,
    lanes: Extents,
    *,
    native: str | None = None,
) -> tuple[DeltaState, jax.Array]:
    """Up to T positions of each lane: `projected [P T, projected features]` -> `[P T, inner features]`, float32.

    A lane that starts at 0 starts from zeros.
    """
    mixed, gates, rate, step = _split(form, projected)
    inputs, window = _windows(state.inputs, mixed.reshape(len(lanes.slot), -1, mixed.shape[1]), lanes)
    convolved = _convolve(window, weights.convolution).reshape(mixed.shape)
    heads = _heads(form, weights, convolved, rate, step)
    memory, out = lane_rule(state.memory, heads, lanes, native=native)
    return DeltaState(inputs, memory), _gated(form, weights, out, gates)


class Pending(NamedTuple):
    """The inputs of a verify step, until it is known how many positions are accepted.

    window: `[P, kernel - 1 + T, mixed features]`, the convolution's inputs, preceded by those in the slot.
    heads: of N = P T positions.
    """

    window: jax.Array
    heads: Heads


def delta_verify(
    form: DeltaForm,
    weights: DeltaWeights,
    state: DeltaState,
    projected: jax.Array,
    lanes: Extents,
    *,
    native: str,
) -> tuple[Pending, jax.Array]:
    """`delta_prefill` without changing the state, for lanes of distinct slots, none of which starts at 0."""
    mixed, gates, rate, step = _split(form, projected)
    by_lane = (len(lanes.slot), -1, mixed.shape[1])
    window = jnp.concatenate([state.inputs[lanes.slot], mixed.reshape(by_lane)], axis=1)
    convolved = _convolve(window, weights.convolution).reshape(mixed.shape)
    heads = _heads(form, weights, convolved, rate, step)
    out = native_outputs(state.memory, heads, lanes, native)
    return Pending(window, heads), _gated(form, weights, out, gates)


def delta_commit(
    state: DeltaState, pending: Pending, *, slot: jax.Array, count: jax.Array, native: str
) -> DeltaState:
    """The state after the first `count [P]` positions of each lane, which are computed again."""
    kept = state.inputs.shape[1]
    behind = jax.vmap(lambda window, at: lax.dynamic_slice_in_dim(window, at, kept))(pending.window, count)
    inputs = put(state.inputs, targets(slot, count > 0, len(state.inputs)), behind)
    lanes = Extents(slot, jnp.ones_like(slot), count)
    memory, _ = lane_rule(state.memory, pending.heads, lanes, native=native)
    return DeltaState(inputs, memory)


def _split(form: DeltaForm, projected: jax.Array) -> list[jax.Array]:
    """The parts of a projection: the convolution's inputs, gates, rates, decay steps."""
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


def _windows(kept: jax.Array, mixed: jax.Array, lanes: Extents) -> tuple[jax.Array, jax.Array]:
    """The slots' new convolution inputs, and `mixed [P, T, C]` preceded by the earlier inputs, `[P, kernel - 1 + T,
    C]`.

    Runs lane by lane, because a lane may continue the previous one.
    """

    def one(kept: jax.Array, lane: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        mixed, slot, start, count = lane
        before = jnp.where(start == 0, 0, kept[slot])
        window = jnp.concatenate([before, mixed])
        behind = lax.dynamic_slice_in_dim(window, count, len(before))
        return kept.at[slot].set(jnp.where(count > 0, behind, kept[slot])), window

    return lax.scan(one, kept, (mixed, *lanes))


def _heads(
    form: DeltaForm, weights: DeltaWeights, convolved: jax.Array, rate: jax.Array, step: jax.Array
) -> Heads:
    """The heads from `convolved [N, mixed features]`, `rate` and `step` `[N, Hv]`."""
    keys = form.key_heads * form.key_dim
    q, k, v = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    q, k = (_unit(x.reshape(-1, form.key_heads, form.key_dim)) for x in (q, k))
    return Heads(
        q * (1 / math.sqrt(form.key_dim)),
        k,
        v.reshape(-1, form.value_heads, form.value_dim),
        flatly(jax.nn.sigmoid, rate),
        -jnp.exp(weights.decay) * flatly(jax.nn.softplus, step + weights.step_bias),
    )


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(sum_last(x * x) + _NORM_EPS)


def _gated(form: DeltaForm, weights: DeltaWeights, out: jax.Array, gates: jax.Array) -> jax.Array:
    """Each head of `out [N, Hv, Dv]` normalised and gated: `[N, inner features]`."""
    return rms_norm(out, weights.norm, form.norm_eps).reshape(gates.shape) * jax.nn.silu(gates)
