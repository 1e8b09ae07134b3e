"""Attention over whole sequences in plain JAX, without a cache: for the reference, and for gradients."""

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.ops.norms import normed_and_rotated, scaled_queries, split_heads

Stored = tuple[jax.Array, jax.Array]  # keys, normed and rotated, and values, `[N, KV, Dh]`


def attend_densely(
    config: ModelConfig,
    index: int,
    own: AttentionWeights,
    qkv: jax.Array,
    rope: jax.Array,
    stored: dict[int, Stored],
) -> jax.Array:
    """Causal attention of one sequence over itself in layer `index`, float32 `[N, H Dh]`.

    qkv: the fused projection `[N, F]`, not yet rotated. rope: the tables of `rope_tables` at its positions,
    `[K, N, 2, Dh/2]`. stored: receives the keys and values of layers that have their own, and has those of the
    layers before.
    """
    count, form, sizes = len(qkv), config.attention(index), config.layer(index)
    qkv = scaled_queries(config, qkv, rope)
    table = rope[config.rope_index(index), ..., : sizes.head_dim // 2]
    key = jnp.arange(count)
    q, k, v = split_heads(qkv, sizes.num_key_value_heads, sizes.head_dim, form)
    q = normed_and_rotated(q, form, own.q_norm, table)
    if form.stored_parts:
        stored[index] = normed_and_rotated(k, form, own.k_norm, table), v
    k, v = stored[config.keys_of(index)]
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
