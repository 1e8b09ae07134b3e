"""Device state of the rows: everything a decode step needs to know about a request, one entry per slot."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row; N is B for the decode state and P for prefill lanes.

    temperature: f32 `[N]`, 0 is greedy.
    top_k: i32 `[N]`, 0 keeps all.   top_p: f32 `[N]`, 1 keeps all.   min_p: f32 `[N]`, 0 keeps all.
    seed: u32 `[N, 2]`, the 64-bit seed as (high, low).
    wants_logprob: bool `[N]`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    wants_logprob: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The engine's device state besides the cache.

    token: i32 `[B]`, the last sampled token, input of the next step.
    length: i32 `[B]`, valid KV entries; also the index at which `token`'s KV will be written.
    remaining: i32 `[B]`, tokens the row may still sample; 0 means the row is done.
    stop_ids: i32 `[B, E]`, ids that end the row, padded with -1.
    sampling: the request's sampling parameters.

    A row is active while `remaining > 0`; sampling a stop id sets it to 0 on the device, so that a step
    dispatched before the host has seen the token is already right.
    """

    token: jax.Array
    length: jax.Array
    remaining: jax.Array
    stop_ids: jax.Array
    sampling: SamplingRows


def make_rows(count: int, stop_width: int) -> Rows:
    """All rows inactive."""
    return Rows(
        token=jnp.zeros(count, jnp.int32),
        length=jnp.zeros(count, jnp.int32),
        remaining=jnp.zeros(count, jnp.int32),
        stop_ids=jnp.full((count, stop_width), -1, jnp.int32),
        sampling=SamplingRows(
            temperature=jnp.zeros(count, jnp.float32),
            top_k=jnp.zeros(count, jnp.int32),
            top_p=jnp.ones(count, jnp.float32),
            min_p=jnp.zeros(count, jnp.float32),
            seed=jnp.zeros((count, 2), jnp.uint32),
            wants_logprob=jnp.zeros(count, bool),
        ),
    )


def remaining_after(token: jax.Array, remaining: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Tokens left after sampling `token [N]`: one fewer, or none after a stop id."""
    stopped = jnp.any(token[:, None] == stop_ids, axis=1)
    return jnp.where(stopped, 0, remaining - 1)


def pack_samples(token: jax.Array, logprob: jax.Array) -> jax.Array:
    """Tokens and logprobs as one i32 `[2, N]`: one small copy to the host instead of two."""
    return jnp.stack([token, jax.lax.bitcast_convert_type(logprob, jnp.int32)])


def unpack_samples(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Host side of `pack_samples`: token ids i32 `[N]` (-1: no token) and logprobs f32 `[N]`."""
    return packed[0], packed[1].view(np.float32)
