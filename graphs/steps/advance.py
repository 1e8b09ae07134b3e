"""The end of every step: advance the state of its rows on the device."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from xla_engine.graphs.row_state.rows import NO_CHOICE, Rows


def ends(token: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """Whether each `token [..., N]` ends its row, because it is in `stop_ids [..., N, E]` or NO_CHOICE."""
    return jnp.any(token[..., None] == stop_ids, axis=-1) | (token == NO_CHOICE)


def advance(
    rows: Rows,
    *,
    token: jax.Array,
    length: jax.Array,
    ended: jax.Array,
    emitted: jax.Array | int,
    remaining: jax.Array,
    min_remaining: jax.Array,
) -> Rows:
    """Rows after they have sampled `emitted` tokens each, `token` being the last.

    length: the new length. ended: whether `token` ends the row. remaining, min_remaining: the values before the step.
    """
    return replace(
        rows,
        token=token,
        length=length,
        remaining=jnp.where(ended, 0, remaining - emitted),
        min_remaining=jnp.maximum(min_remaining - emitted, 0),
    )
