"""Row-wise pieces of a decoder layer. Everything here treats each row alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.target import platform


def flatly(function: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """`function` of each of few values, computed over one flat row.

    XLA:CPU rounds exponentials over rows of at most 8 entries differently than over longer ones
    (findings/same_bits.md).
    """
    flat = function(jax.lax.optimization_barrier(values.reshape(-1)))
    return jax.lax.optimization_barrier(flat).reshape(values.shape)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype | None = None) -> jax.Array:
    """Root-mean-square normalisation of `x [..., D]` in float32 (Zhang and Sennrich 2019), rounded to `dtype`."""
    rounded = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if platform() == "cpu":  # Pallas takes a while to import
        return _written_out(x, weight, eps, rounded)
    if platform() == "tpu":
        from xla_engine.graphs.ops.tpu_rows import tpu_rms_norm

        return tpu_rms_norm(x, weight, eps, rounded)
    from xla_engine.graphs.ops.gpu_rows import gpu_rms_norm

    return jax.lax.platform_dependent(
        cuda=lambda: gpu_rms_norm(x, weight, eps, rounded),
        default=lambda: _written_out(x, weight, eps, rounded),
    )


def _written_out(x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    scale = jax.lax.rsqrt(sum_last(x * x) / x.shape[-1] + eps)  # [..., 1]
    return (x * scale * weight).astype(dtype)


def norm_heads(heads: jax.Array, form: AttentionForm, weight: jax.Array | None) -> jax.Array:
    """Every head of `heads [..., Dh]`, normalised if the model does so."""
    return heads if weight is None else rms_norm(heads, weight, form.norm_eps)


def centred(x: jax.Array) -> jax.Array:
    """`x [N, D]` less its mean: what LayerNorm (Ba et al. 2016) does before `rms_norm`."""
    return x - sum_last(x) / x.shape[-1]


def split_heads(
    qkv: jax.Array, kv_heads: int, head_dim: int, form: AttentionForm
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a fused projection `[N, F]` into q `[N, H, Dh]`, k and v `[N, KV, Dh]`; values are normalised if the model
    does so. KV is 0 if the layer attends to the keys of another."""
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    queries = heads.shape[1] - form.stored_parts * kv_heads
    q, k, v = heads[:, :queries], heads[:, queries : queries + kv_heads], heads[:, queries + kv_heads :]
    v = k if form.stored_parts == 1 else v
    if form.value_norm and form.stored_parts:
        v = rms_norm(v, jnp.ones(head_dim, jnp.float32), form.norm_eps)
    return q, k, v


def scaled_queries(config: ModelConfig, projected: jax.Array, angles: jax.Array) -> jax.Array:
    """`projected [N, (H + 2 KV) Dh]` with queries scaled by position, if the model does so.

    angles: the tables of `rope_tables` at the positions of the rows, `[K, ..., 2, Dh/2]`.
    """
    if config.llama_4_scaling_beta is None:
        return projected
    factor = angles[-1, ..., 0, 0].reshape(-1, 1)
    queries, rest = jnp.split(projected, [config.num_attention_heads * config.head_dim], axis=1)
    return jnp.concatenate([queries * factor, rest], axis=1)


def normed_and_rotated(
    heads: jax.Array, form: AttentionForm, weight: jax.Array | None, rope: jax.Array
) -> jax.Array:
    """Query or key heads `[..., heads, Dh]` as attention takes them. rope: as in `apply_rope`."""
    if form.norm_last:
        return norm_heads(apply_rope(heads, rope), form, weight)
    return apply_rope(norm_heads(heads, form, weight), rope)


def apply_rope(x: jax.Array, rope: jax.Array) -> jax.Array:
    """Rotate `x [..., heads, Dh]` by `rope [..., 2, Dh/2]` (cosines, sines); half-split pairs as in Hugging Face."""
    cos, sin = rope[..., None, 0, :], rope[..., None, 1, :]  # [..., 1, Dh/2]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
