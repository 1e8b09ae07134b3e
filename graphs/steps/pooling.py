"""Pooling: a separate program that runs after a prefill call with prompts to pool."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.config import LAST
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.fixed_order_sums import sum_middle

_GROUP = 16  # positions that the device sums; the host adds the groups, in order


def pool_chunk(
    spec: ModelSpec, kind: str, width: int, weights: list[jax.Array], hidden: jax.Array, count: jax.Array
) -> jax.Array:
    """Apply the final norm to the residual stream `hidden f32 [P * width, D]` and pool each lane's `count i32 [P]`
    tokens.

    Static: `spec`; `kind`, one of POOLING_TYPES; `width`, positions of a lane. A lane of count 0 is skipped.
    Returns f32 `[P, G, D]`: for LAST the vector of the last token, G = 1; for MEAN the sums of each `gcd(width, 16)`
    positions. Prompts are cut at multiples of `width`, so these sums are the same for any `width` that is a multiple
    of 16.
    """
    model = spec.merge(weights)
    lanes = hidden.reshape(count.shape[0], width, -1)
    size = math.gcd(width, _GROUP)

    def last(lane: jax.Array, count: jax.Array) -> jax.Array:
        return model.normed(lax.dynamic_slice_in_dim(lane, count - 1, 1))

    def sums(lane: jax.Array, count: jax.Array) -> jax.Array:
        used = jnp.arange(width, dtype=jnp.int32) < count
        normed = jnp.where(used[:, None], model.normed(lane), 0)  # unused positions may be NaN
        return sum_middle(normed.reshape(-1, size, normed.shape[1]))

    groups = 1 if kind == LAST else width // size
    nothing = jnp.zeros((groups, lanes.shape[2]), jnp.float32)

    def one(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(each[1] > 0, last if kind == LAST else sums, lambda *_: nothing, *each)

    return lax.map(one, (lanes, count))  # one shape for any number of lanes, so that no bit depends on it
