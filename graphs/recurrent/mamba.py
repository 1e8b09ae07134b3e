"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state space for each head with one decay, and a skip around it."""

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.ops.norms import flatly, rms_norm
from xla_engine.graphs.recurrent.kind import Kind, MambaWeights, Others, RecurrentWeights
from xla_engine.graphs.recurrent.rule import Heads
from xla_engine.graphs.recurrent_forms import MambaForm, Recurrent


def scaled(form: MambaForm, projected: jax.Array) -> jax.Array:
    """`projected [N, F]` times the factors of its parts, if they have any."""
    keys = form.key_heads * form.key_dim
    sizes = (form.inner_features, form.inner_features, keys, keys, form.value_heads)
    if form.multipliers == (1.0,) * len(sizes):
        return projected
    return projected * jnp.asarray(np.repeat(np.asarray(form.multipliers, np.float32), sizes))


def _split(form: Recurrent, projected: jax.Array) -> tuple[jax.Array, Others]:
    """The convolution's inputs; then gates and steps."""
    assert isinstance(form, MambaForm)
    projected = scaled(form, projected)
    ends = (form.inner_features, form.inner_features + form.mixed_features)
    gates, mixed, steps = jnp.split(projected, ends, axis=-1)
    return mixed, (gates, steps)


def _heads(form: Recurrent, weights: RecurrentWeights, convolved: jax.Array, others: Others) -> Heads:
    """The heads from `convolved [N, mixed features]`, and steps `[N, Hv]`."""
    assert isinstance(form, MambaForm) and isinstance(weights, MambaWeights)
    keys = form.key_heads * form.key_dim
    x, b, c = jnp.split(convolved, [form.inner_features, form.inner_features + keys], axis=-1)
    step = flatly(jax.nn.softplus, others[1] + weights.step_bias)
    step = jnp.clip(step, *form.step_limits)
    by_group = (-1, form.key_heads, form.key_dim)
    return Heads(
        c.reshape(by_group),
        b.reshape(by_group),
        x.reshape(-1, form.value_heads, form.value_dim),
        step,
        (-flatly(jnp.exp, weights.decay) * step)[..., None],
    )


def _output(
    form: Recurrent,
    weights: RecurrentWeights,
    convolved: jax.Array,
    out: jax.Array | None,
    others: Others,
) -> jax.Array:
    """`out [N, Hv, Dv]` plus the skip, gated, and normalised in groups: `[N, inner features]`."""
    assert isinstance(form, MambaForm) and isinstance(weights, MambaWeights) and out is not None
    gates = jax.nn.silu(others[0])
    x = convolved[:, : form.inner_features].reshape(out.shape)
    out = (out + weights.skip[:, None] * x).reshape(gates.shape)
    if weights.norm is None:
        return out * gates
    out = out * gates if form.norm == "gated" else out
    groups = out.reshape(len(out), form.key_heads, -1)
    whole = jnp.ones(groups.shape[-1], jnp.float32)
    out = rms_norm(groups, whole, form.norm_eps).reshape(out.shape) * weights.norm
    return out if form.norm == "gated" else out * gates


KIND = Kind(_split, _heads, _output)
