"""The end of every step: sample its rows, and advance their state on the device."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.row_state.rows import NO_CHOICE, Rows, Tables
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling.logits import Logits, Sampled
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.sampler import sample


class SampledRows(NamedTuple):
    """The N rows of logits that a step samples.

    live: bool `[N]`, the sample will be used.
    slot: i32 `[N]`.
    position: i32 `[N]`, of the new token in its sequence.
    prompt_length, min_remaining, stop_ids, sampling: as in `Rows`, for these rows.
    draft: i32 `[N]`, as in `SamplingContext`.
    """

    live: jax.Array
    slot: jax.Array
    position: jax.Array
    prompt_length: jax.Array
    min_remaining: jax.Array
    stop_ids: jax.Array
    sampling: SamplingRows
    draft: jax.Array | None = None


def sample_rows(
    logits: Logits,
    at: SampledRows,
    rows: Rows,
    tables: Tables,
    *,
    native: str | None,
    processed: bool = False,
) -> Sampled:
    """Sample from `logits`. rows: their history must reach up to each position. native, processed: as in `sample`."""
    context = SamplingContext(
        live=at.live,
        slot=at.slot,
        length=at.position,
        prompt_length=at.prompt_length,
        min_remaining=at.min_remaining,
        stop_ids=at.stop_ids,
        history=rows.history,
        tables=tables,
        block_tables=rows.block_tables,
        draft=at.draft,
    )
    return sample(logits, at.sampling, at.position, context, processed_logprobs=processed, native=native)


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
