"""The decode step: one token for every live row, one program for every load."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from graphs.attention import KVCache
from graphs.model import ModelSpec
from graphs.projection import WEIGHT_LEFT
from graphs.rows import Rows, pack_samples, remaining_after
from graphs.sampling import sample


def decode_step(
    spec: ModelSpec,
    key_length: int,
    weights: list[jax.Array],
    rope: jax.Array,
    cache: KVCache,
    rows: Rows,
    scheduled: jax.Array,
) -> tuple[KVCache, Rows, jax.Array]:
    """Feed each live row its last token and sample the next one.

    Static: `spec`, and `key_length`, the bucket of keys attended to; every live row's length is below it.
    `rope [S, 2, Dh/2]`; `scheduled bool [B]`: rows the plan names. A row is live when it is scheduled and still has
    tokens to sample; other rows write nothing and keep their state.
    Returns cache, rows and the packed samples `[2, B]` (token -1 where the row was not live).
    """
    live = scheduled & (rows.remaining > 0)
    model = spec.merge(weights)
    angles = rope[rows.length]  # [B, 2, Dh/2]
    updated: KVCache = list(cache)

    def attend(index: int, qkv: jax.Array) -> jax.Array:
        updated[index], out = spec.attention.attend_decode(
            cache[index],
            qkv,
            rope=angles,
            length=rows.length,
            live=live,
            key_length=key_length,
            compute_dtype=spec.dtype,
        )
        return out

    hidden = model.hidden(rows.token, attend, WEIGHT_LEFT)
    logits = model.logits(hidden)  # [V, B]
    token, logprob = sample(logits, rows.sampling, rows.length + 1)
    advanced = Rows(
        token=jnp.where(live, token, rows.token),
        length=jnp.where(live, rows.length + 1, rows.length),
        remaining=jnp.where(live, remaining_after(token, rows.remaining, rows.stop_ids), rows.remaining),
        stop_ids=rows.stop_ids,
        sampling=rows.sampling,
    )
    return updated, advanced, pack_samples(jnp.where(live, token, -1), logprob)
