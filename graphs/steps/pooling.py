"""One vector for a prompt: a program of its own, run after a prefill call that had prompts to pool."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.config import LAST
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.fixed_order_sums import sum_middle

_GROUP = 16  # positions that are added up here; the host adds the groups, in order


def pool_chunk(
    spec: ModelSpec, kind: str, width: int, weights: list[jax.Array], hidden: jax.Array, count: jax.Array
) -> jax.Array:
    """Pool each lane's `count i32 [P]` tokens, of which the residual stream is `hidden f32 [P * width, D]`, behind the
    last norm. A lane of count 0 asks for nothing.

    Static: `spec`; `kind`, one of POOLING_TYPES; `width`, positions of a lane.
    Returns f32 `[P, G, D]`: for LAST the vector of the last token, G = 1. For MEAN the sums of each `gcd(width, 16)`
    positions; prompts are cut at multiples of `width`, so that these sums are the same for any multiple of 16.
    """
    model = spec.merge(weights)
    lanes = hidden.reshape(count.shape[0], width, -1)
    size = math.gcd(width, _GROUP)

    def last(lane: jax.Array, count: jax.Array) -> jax.Array:
        return model.normed(lax.dynamic_slice_in_dim(lane, count - 1, 1))

    def sums(lane: jax.Array, count: jax.Array) -> jax.Array:
        used = jnp.arange(width, dtype=jnp.int32) < count
        normed = jnp.where(used[:, None], model.normed(lane), 0)  # what is not used may be no number
        return sum_middle(normed.reshape(-1, size, normed.shape[1]))

    groups = 1 if kind == LAST else width // size
    nothing = jnp.zeros((groups, lanes.shape[2]), jnp.float32)

    def one(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(each[1] > 0, last if kind == LAST else sums, lambda *_: nothing, *each)

    return lax.map(one, (lanes, count))  # one shape for any number of lanes, so that it changes no bit
