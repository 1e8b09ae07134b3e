"""From logits to one token per row. Logits are vocabulary-major here, float32 `[V, N]`; C++ takes them by row as well.

The stages are `STAGES` of `graphs.row_state.sampling_fields`; the first are adjustments
(`graphs.sampling.logits_processors`). Each row is a function of its own logits, parameters, history, seed and
position; `lax.cond` only decides whether work that no row wants is skipped, never what a row gets.

The draw inverts the cumulative distribution in vocabulary order with one uniform number per row, keyed by (seed,
position): a quarter of the cost of Gumbel noise over the whole vocabulary (findings/sampler.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_middle
from xla_engine.graphs.ops.reductions import (
    GROUP,
    argmax,
    as_columns,
    as_rows,
    cumulative,
    groups,
    per_column,
    take_group,
)
from xla_engine.graphs.row_state.rows import NO_CHOICE
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.sampling.logits_processors import SamplingContext, adjust, wants_adjustment
from xla_engine.graphs.sampling.logprobs import logprobs
from xla_engine.graphs.sampling.native import native_sample
from xla_engine.graphs.sampling.sampled import Sampled
from xla_engine.graphs.sampling.truncation import threshold


def sample(
    logits: Logits,
    rows: SamplingRows,
    position: jax.Array,
    context: SamplingContext | None = None,
    *,
    processed_logprobs: bool = False,
    native: str | None = None,
) -> Sampled:
    """Sample one token per row, or NO_CHOICE where logits are not finite or no token is allowed.

    position `[N]`: index of the new token in its sequence; noise is keyed by (seed, position) only.
    context: None where every row is live and no row wants an adjustment.
    processed_logprobs (static): log-probabilities are those of the distribution drawn from, after adjustments,
    temperature and truncation (a greedy row's: after adjustments); otherwise those of the logits as they came.
    native (static): the instruction set whose C++ library samples (`graphs.sampling.native`); None: JAX does.
    """
    if native is not None:
        given = logits, rows, position, context
        return native_sample(*given, processed_logprobs=processed_logprobs, isa=native)
    assert not isinstance(logits, ByRow)
    live = jnp.ones(position.shape, bool) if context is None else context.live
    random = live & (rows.temperature > 0)
    is_adjusted = jnp.zeros_like(live) if context is None else wants_adjustment(rows, context)

    def adjusted() -> jax.Array:
        if context is None:
            return logits
        return lax.cond(jnp.any(is_adjusted), lambda: adjust(logits, rows, context), lambda: logits)

    def choose() -> jax.Array:
        shifted = adjusted()
        greedy = argmax(shifted)
        token = lax.cond(
            jnp.any(random),
            lambda: jnp.where(random, _draw(shifted, rows, random, position), greedy),
            lambda: greedy,
        )
        return _if_any(token, shifted, greedy)

    def choose_greedily() -> jax.Array:
        greedy = argmax(logits)
        return _if_any(greedy, logits, greedy)

    token = lax.cond(jnp.any(random | is_adjusted), choose, choose_greedily)
    scored = _restricted(adjusted(), rows, random) if processed_logprobs else logits
    return Sampled(token, *logprobs(scored, token, jnp.where(live, rows.num_logprobs, -1)))


def _if_any(token: jax.Array, logits: jax.Array, best: jax.Array) -> jax.Array:
    """`token [N]`, or NO_CHOICE where the largest logit, at `best [N]`, is no finite number.

    That is where no token is allowed, and where the hidden state is not finite: then every logit is NaN or infinite,
    so that one of them tells, whatever a maximum makes of NaN on this platform.
    """
    peak = jnp.take_along_axis(logits, best[None], axis=0)[0]
    return jnp.where(jnp.isfinite(peak), token, NO_CHOICE)


def _weights(logits: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    """Probabilities relative to the most likely token's `[V, N]`; zero where a row may not draw the token.

    Rows that do not draw have temperature 1 and no truncation but min-p. Over V in one pass, unless a row truncates.
    """
    temperature = jnp.where(random, rows.temperature, 1.0)
    peak = jnp.max(logits, axis=0)
    least = lax.cond(
        jnp.any(random & ((rows.top_k > 0) | (rows.top_p < 1))),
        lambda: threshold(logits, peak, temperature, rows, random),
        lambda: jnp.full(peak.shape, -jnp.inf, jnp.float32),
    )
    values = as_rows(logits)
    weight = jnp.exp(
        (values - per_column(peak)) / per_column(temperature)
    )  # the largest logit's is exactly 1
    kept = (weight >= per_column(rows.min_p)) & (values >= per_column(least))
    return as_columns(jnp.where(kept, weight, 0.0), logits.shape)


def _draw(logits: jax.Array, rows: SamplingRows, random: jax.Array, position: jax.Array) -> jax.Array:
    """Draw from the restricted distribution, i32 `[N]`."""
    return _invert(_weights(logits, rows, random), _uniform(rows.seed, position))


def _restricted(logits: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    """Logits of the distribution drawn from `[V, N]`; those of rows that do not draw as they are."""
    scaled = logits / jnp.where(random, rows.temperature, 1.0)
    return jnp.where(random & (_weights(logits, rows, random) == 0), -jnp.inf, scaled)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, a function of its (seed `[2]`, position) alone, f32 `[N]`."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(one)(seed, position)


def _invert(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index at which the cumulative `weight [V, N]` passes `uniform [N]` of the total; its weight is positive.

    Two levels: the group whose cumulative sum passes, then the entry inside it.
    """
    grouped = groups(weight, 0.0)
    totals = sum_middle(grouped)
    passing = cumulative(totals)  # [V / group, N]
    target = uniform * passing[-1]
    group = _first_passing(passing, totals, target)
    before = jnp.take_along_axis(passing, jnp.maximum(group - 1, 0)[None], axis=0)[0]
    inside = take_group(grouped, group)  # [group, N]
    passed = jnp.where(group > 0, before, 0.0) + cumulative(inside)
    return group * GROUP + _first_passing(passed, inside, target)


def _first_passing(passing: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """First index along axis 0 with positive weight whose cumulative sum `passing` passes `target [N]`, i32 `[N]`.

    Where rounding leaves every sum short of the target, the last index with positive weight.
    """
    positive = weight > 0
    passed = (passing > target) & positive
    last = weight.shape[0] - 1 - jnp.argmax(jnp.flip(positive, axis=0), axis=0)
    return jnp.where(jnp.any(passed, axis=0), jnp.argmax(passed, axis=0), last).astype(jnp.int32)
