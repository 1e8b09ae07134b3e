"""Attention over whole sequences in plain JAX, without a cache: for the reference, and for gradients."""

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import AttentionForm, ModelConfig
from xla_engine.graphs.ops.norms import apply_rope, norm_heads, split_heads


def attend_densely(
    config: ModelConfig, form: AttentionForm, own: AttentionWeights, qkv: jax.Array, table: jax.Array
) -> jax.Array:
    """Causal attention of one sequence over itself, float32 `[N, H Dh]`.

    qkv: the fused projection `[N, (H + 2 KV) Dh]`, not yet rotated. table: `[N, 2, Dh/2]`, cosines and sines.
    """
    count = len(qkv)
    key = jnp.arange(count)
    q, k, v = split_heads(qkv, config.num_key_value_heads, config.head_dim)
    q, k = norm_heads(q, form, own.q_norm), norm_heads(k, form, own.k_norm)
    q, k = apply_rope(q, table), apply_rope(k, table)
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))  # [N, H, Dh]
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * form.scale
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    seen = (key <= key[:, None]) & (key > key[:, None] - (form.window or count))
    scores = jnp.where(seen, scores, -jnp.inf)
    if own.sinks is not None:
        sinks = jnp.broadcast_to(own.sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weight = jax.nn.softmax(scores, axis=-1)[..., :count]
    return jnp.einsum("hqk,khd->qhd", weight, v, precision="highest").reshape(count, -1)
