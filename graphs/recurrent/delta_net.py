"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): linear attention whose memory corrects what it
recalls. Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692) has a decay for each channel of a key."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import flatly, rms_norm
from xla_engine.graphs.recurrent.kind import DeltaWeights, Kind, Others, RecurrentWeights
from xla_engine.graphs.recurrent.rule import Heads
from xla_engine.graphs.recurrent_forms import DeltaForm, Recurrent

_NORM_EPS = 1e-6  # for the L2 norm of queries and keys


def _split(form: Recurrent, projected: jax.Array) -> tuple[jax.Array, Others]:
    """The convolution's inputs; then gates, rates and decay steps."""
    assert isinstance(form, DeltaForm)
    ends = (form.mixed_features, form.mixed_features + form.inner_features)
    mixed, *others = jnp.split(projected, [*ends, ends[1] + form.value_heads], axis=-1)
    return mixed, tuple(others)


def _heads(form: Recurrent, weights: RecurrentWeights, convolved: jax.Array, others: Others) -> Heads:
    """The heads from `convolved [N, mixed features]`, rates `[N, Hv]` and steps `[N, decay features]`."""
    assert isinstance(form, DeltaForm) and isinstance(weights, DeltaWeights)
    _, rate, step = others
    keys = form.key_heads * form.key_dim
    q, k, v = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    q, k = (_unit(x.reshape(-1, form.key_heads, form.key_dim)) for x in (q, k))
    speed = -jnp.exp(weights.decay)
    speed = jnp.repeat(speed, form.key_dim) if form.gate_rank else speed
    log_decay = speed * flatly(jax.nn.softplus, step + weights.step_bias)
    return Heads(
        q * (1 / math.sqrt(form.key_dim)),
        k,
        v.reshape(-1, form.value_heads, form.value_dim),
        flatly(jax.nn.sigmoid, rate) * form.rate_factor,
        log_decay.reshape(len(rate), form.value_heads, -1),
    )


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(sum_last(x * x) + _NORM_EPS)


def _output(
    form: Recurrent, weights: RecurrentWeights, _: jax.Array, out: jax.Array | None, others: Others
) -> jax.Array:
    """Each head of `out [N, Hv, Dv]` normalised and gated: `[N, inner features]`."""
    assert isinstance(form, DeltaForm) and isinstance(weights, DeltaWeights) and out is not None
    gates = others[0]
    activation = jax.nn.sigmoid if form.gate_rank else jax.nn.silu
    return rms_norm(out, weights.norm, form.norm_eps).reshape(gates.shape) * activation(gates)


KIND = Kind(_split, _heads, _output)
