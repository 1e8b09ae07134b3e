"""The prefill chunk: P lanes of T prompt tokens, written straight into the slots of the donated cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from graphs.attention import KVCache
from graphs.model import ModelSpec
from graphs.projection import ROWS_LEFT
from graphs.rows import Rows, SamplingRows, pack_samples, remaining_after
from graphs.sampling import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One prefill call. An unused lane has count 0 and is_last false.

    tokens: i32 `[P, T]`, padded.
    slot, start, count: i32 `[P]`: `tokens[p, :count]` are positions `start ..` of slot `slot`.
    is_last: bool `[P]`, the chunk completes its prompt: sample the first token and activate the row.
    max_tokens: i32 `[P]`, stop_ids: i32 `[P, E]`, sampling: the request's; read where is_last.
    """

    tokens: jax.Array
    slot: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    max_tokens: jax.Array
    stop_ids: jax.Array
    sampling: SamplingRows


def prefill_chunk(
    spec: ModelSpec,
    key_length: int,
    head_rows: int,
    weights: list[jax.Array],
    rope: jax.Array,
    cache: KVCache,
    rows: Rows,
    lanes: Lanes,
) -> tuple[KVCache, Rows, jax.Array]:
    """Run one chunk per lane; a lane that completes its prompt samples the first token and arms its row.

    Static: `spec`; `key_length`, the bucket of keys attended to, every lane ends at or below it; `head_rows >= P`,
    the rows of output head and sampler, the same in every prefill graph so that the number of lanes changes no bit.
    Returns cache, rows and the packed samples `[2, P]` (token -1 for lanes that complete nothing).
    """
    count, width = lanes.tokens.shape
    model = spec.merge(weights)
    updated: KVCache = list(cache)
    position = jnp.minimum(lanes.start[:, None] + jnp.arange(width, dtype=jnp.int32), rope.shape[0] - 1)
    angles = rope[position]  # [P, T, 2, Dh/2]
    fresh = (lanes.count > 0) & (lanes.start == 0)

    def attend(index: int, qkv: jax.Array) -> jax.Array:
        updated[index], out = spec.attention.attend_prefill(
            spec.attention.clear_values(cache[index], lanes.slot, fresh),
            qkv,
            rope=angles,
            slot=lanes.slot,
            start=lanes.start,
            count=lanes.count,
            key_length=key_length,
            compute_dtype=spec.dtype,
        )
        return out

    hidden = model.hidden(lanes.tokens.reshape(-1), attend, ROWS_LEFT)  # [P * T, D]
    final = hidden[jnp.arange(count, dtype=jnp.int32) * width + jnp.maximum(lanes.count - 1, 0)]  # [P, D]
    length = lanes.start + lanes.count
    widen = functools.partial(_widen, head_rows)
    logits = model.logits(widen(final))  # [V, head_rows]
    token, logprob = sample(logits, jax.tree.map(widen, lanes.sampling), widen(length))
    token, logprob = token[:count], logprob[:count]
    armed = _arm(rows, lanes, token, length)
    return updated, armed, pack_samples(jnp.where(lanes.is_last, token, -1), logprob)


def _widen(count: int, rows: jax.Array) -> jax.Array:
    """Pad the leading axis with zeros up to `count`."""
    return jnp.pad(rows, ((0, count - rows.shape[0]), *((0, 0),) * (rows.ndim - 1)))


def _arm(rows: Rows, lanes: Lanes, token: jax.Array, length: jax.Array) -> Rows:
    """Set the row of every lane that completed its prompt; other rows keep their state."""
    count = rows.token.shape[0]
    # Lanes that arm nothing aim at distinct rows out of bounds, so that indices stay unique.
    target = jnp.where(lanes.is_last, lanes.slot, count + jnp.arange(lanes.slot.shape[0], dtype=jnp.int32))

    def put(row: jax.Array, new: jax.Array) -> jax.Array:
        return row.at[target].set(new, mode="drop", unique_indices=True)

    remaining = remaining_after(token, lanes.max_tokens, lanes.stop_ids)
    state = Rows(
        token=token, length=length, remaining=remaining, stop_ids=lanes.stop_ids, sampling=lanes.sampling
    )
    return jax.tree.map(put, rows, state)
