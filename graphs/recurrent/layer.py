"""Recurrent layers: a short causal convolution and, in most, a memory for each head (`graphs.recurrent.rule`).

Whatever its length, a slot has the last inputs of the convolution and one matrix per head. All of it is float32 and
row-wise. State is written like keys and values: rows that are not live and empty lanes change no byte, and stale
state is never read, because position 0 starts from zeros.

What kinds of layers do differently, they say as a `Kind`: how a projection is split, what the rule is given, and how
its outputs become the layer's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.recurrent import delta_net, mamba, short_convolution
from xla_engine.graphs.recurrent.kind import Kind, RecurrentState, RecurrentWeights
from xla_engine.graphs.recurrent.native import has_native_layer, native_layer, native_outputs
from xla_engine.graphs.recurrent.rule import lane_rule, step_rule
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm, Recurrent
from xla_engine.graphs.row_state.rows import Extents

_KINDS: dict[type[Recurrent], Kind] = {
    DeltaForm: delta_net.KIND,
    ConvolutionForm: short_convolution.KIND,
    MambaForm: mamba.KIND,
}


def make_state(form: Recurrent, rows: int) -> RecurrentState:
    """Zero state for `rows` slots."""
    inputs = jnp.zeros((rows, form.kernel - 1, form.mixed_features), jnp.float32)
    if isinstance(form, ConvolutionForm):
        return RecurrentState(inputs, None)
    return RecurrentState(
        inputs, jnp.zeros((rows, form.value_heads, form.key_dim, form.value_dim), jnp.float32)
    )


def recurrent_decode(
    form: Recurrent,
    weights: RecurrentWeights,
    state: RecurrentState,
    projected: jax.Array,
    *,
    live: jax.Array,
    native: str | None = None,
) -> tuple[RecurrentState, jax.Array]:
    """One position of every live row: `projected [B, projected features]` -> `[B, inner features]`, float32.

    native: the instruction set whose C++ library runs the layer; None: pure JAX.
    """
    if native and has_native_layer(form):
        every = jnp.arange(len(live), dtype=jnp.int32)
        lanes = Extents(every, jnp.ones_like(every), live.astype(jnp.int32))
        return native_layer(form, weights, state, projected, lanes, native)
    kind = _KINDS[type(form)]
    mixed, others = kind.split(form, projected)
    window = jnp.concatenate([state.inputs, mixed[:, None]], axis=1)  # [B, kernel, features]
    convolved = _convolve(form, weights, window)[:, 0]
    heads, memory, out = kind.heads(form, weights, convolved, others), state.memory, None
    if heads is not None and memory is not None:
        memory, out = step_rule(memory, heads, live=live, corrects=_corrects(form))
    inputs = jnp.where(live[:, None, None], window[:, 1:], state.inputs)
    return RecurrentState(inputs, memory), kind.output(form, weights, convolved, out, others)


def recurrent_prefill(
    form: Recurrent,
    weights: RecurrentWeights,
    state: RecurrentState,
    projected: jax.Array,
    lanes: Extents,
    *,
    native: str | None = None,
) -> tuple[RecurrentState, jax.Array]:
    """Up to T positions of each lane: `projected [P T, projected features]` -> `[P T, inner features]`, float32.

    A lane that starts at 0 starts from zeros.
    """
    if native and has_native_layer(form):
        return native_layer(form, weights, state, projected, lanes, native)
    kind = _KINDS[type(form)]
    mixed, others = kind.split(form, projected)
    inputs, window = _windows(state.inputs, mixed.reshape(len(lanes.slot), -1, mixed.shape[1]), lanes)
    convolved = _convolve(form, weights, window).reshape(mixed.shape)
    heads, memory, out = kind.heads(form, weights, convolved, others), state.memory, None
    if heads is not None and memory is not None:
        memory, out = lane_rule(memory, heads, lanes, corrects=_corrects(form))
    return RecurrentState(inputs, memory), kind.output(form, weights, convolved, out, others)


class PendingInputs(NamedTuple):
    """What the layers of a verify step were given, until it is known how many positions are accepted.

    projected: `[P T, projected features]`.
    """

    weights: RecurrentWeights
    projected: jax.Array


def recurrent_verify(
    form: Recurrent,
    weights: RecurrentWeights,
    state: RecurrentState,
    projected: jax.Array,
    lanes: Extents,
    *,
    native: str | None,
) -> tuple[PendingInputs, jax.Array]:
    """`recurrent_prefill` without changing the state, for lanes of distinct slots, none of which starts at 0.

    Only the C++ layers give verify steps the bits of decode, and convolutions without a rule.
    """
    if native and has_native_layer(form):
        out = native_outputs(form, weights, state, projected, lanes, native)
    else:
        assert state.memory is None
        _, out = recurrent_prefill(form, weights, state, projected, lanes)
    return PendingInputs(weights, projected), out


def recurrent_commit(
    form: Recurrent,
    state: RecurrentState,
    pending: PendingInputs,
    *,
    slot: jax.Array,
    count: jax.Array,
    native: str | None,
) -> RecurrentState:
    """The state after the first `count [P]` positions of each lane, which are computed again."""
    lanes = Extents(slot, jnp.ones_like(slot), count)
    after, _ = recurrent_prefill(form, pending.weights, state, pending.projected, lanes, native=native)
    return after


def _corrects(form: Recurrent) -> bool:
    """Whether the rule corrects what the memory recalls."""
    return isinstance(form, DeltaForm)


def _convolve(form: Recurrent, weights: RecurrentWeights, window: jax.Array) -> jax.Array:
    """Causal convolution of each feature, then SiLU except in a short convolution: `[N, kernel - 1 + T, C]` ->
    `[N, T, C]`."""
    weight, bias = weights.convolution, weights.convolution_bias
    kernel = weight.shape[1]
    width = window.shape[1] - kernel + 1
    total = window[:, :width] * weight[:, 0]
    for index in range(1, kernel):
        total = total + window[:, index : index + width] * weight[:, index]
    total = total if bias is None else total + bias
    return total if isinstance(form, ConvolutionForm) else jax.nn.silu(total)


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
