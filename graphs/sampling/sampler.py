"""The sampler: from logits to one token per row. Logits are vocabulary-major here, float32 `[V, N]`.

The stages are `STAGES` of `graphs.row_state.sampling_fields`; the first are adjustments
(`graphs.sampling.logits_processors`). The result of a row depends only on its own logits, parameters, history, seed
and position; `lax.cond` only skips work that no row needs, and never changes a result.

The draw inverts the cumulative distribution in vocabulary order with one uniform number per row, keyed by (seed,
position). This costs a quarter of Gumbel noise over the whole vocabulary (findings/sampler.md).
"""

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
from xla_engine.graphs.sampling.logits import ByRow, Logits, Sampled
from xla_engine.graphs.sampling.logits_processors import SamplingContext, adjust, wants_adjustment
from xla_engine.graphs.sampling.logprobs import logprobs
from xla_engine.graphs.sampling.native import native_sample
from xla_engine.graphs.sampling.threshold import threshold


def sample(
    logits: Logits,
    rows: SamplingRows,
    position: jax.Array,
    context: SamplingContext | None = None,
    *,
    processed_logprobs: bool = False,
    native: str | None = None,
) -> Sampled:
    """Sample one token per row, or NO_CHOICE if the logits are not finite or no token is allowed.

    position `[N]`: index of the new token in its sequence; noise is keyed by (seed, position) only.
    context: None if every row is live and no row needs an adjustment.
    processed_logprobs (static): log-probabilities are those of the sampled distribution, after adjustments,
    temperature and truncation (for a greedy row: after adjustments). By default they are those of the raw logits.
    native (static): the instruction set of the C++ library to use (`graphs.sampling.native`); None: JAX.
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
    scored = restricted(adjusted(), rows, random) if processed_logprobs else logits
    return Sampled(token, *logprobs(scored, token, jnp.where(live, rows.num_logprobs, -1)))


def _if_any(token: jax.Array, logits: jax.Array, best: jax.Array) -> jax.Array:
    """`token [N]`, or NO_CHOICE if the largest logit, at `best [N]`, is not finite.

    This is so if no token is allowed, or if the hidden state is not finite. Then every logit is NaN or infinite, so
    one of them is enough to check, however this platform treats NaN in a maximum.
    """
    peak = jnp.take_along_axis(logits, best[None], axis=0)[0]
    return jnp.where(jnp.isfinite(peak), token, NO_CHOICE)


def _weights(logits: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    """Probabilities relative to that of the most likely token, `[V, N]`; zero for truncated tokens.

    Greedy rows get temperature 1 and no truncation except min-p. One pass over V, unless a row uses top-k or top-p.
    """
    temperature = jnp.where(random, rows.temperature, 1.0)
    peak = jnp.max(logits, axis=0)
    least = lax.cond(
        jnp.any(random & ((rows.top_k > 0) | (rows.top_p < 1))),
        lambda: threshold(logits, peak, temperature, rows, random),
        lambda: jnp.full(peak.shape, -jnp.inf, jnp.float32),
    )
    values = as_rows(logits)
    # The weight of the largest logit is exactly 1.
    weight = jnp.exp((values - per_column(peak)) / per_column(temperature))
    kept = (weight >= per_column(rows.min_p)) & (values >= per_column(least))
    return as_columns(jnp.where(kept, weight, 0.0), logits.shape)


def _draw(logits: jax.Array, rows: SamplingRows, random: jax.Array, position: jax.Array) -> jax.Array:
    """Draw from the truncated distribution, i32 `[N]`."""
    return _invert(_weights(logits, rows, random), _uniform(rows.seed, position))


def restricted(logits: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    """The logits `[V, N]` of the sampled distribution; those of greedy rows do not change."""
    scaled = logits / jnp.where(random, rows.temperature, 1.0)
    return jnp.where(random & (_weights(logits, rows, random) == 0), -jnp.inf, scaled)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, f32 `[N]`, a function only of its seed `[2]` and position."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(one)(seed, position)


def _invert(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index at which the cumulative `weight [V, N]` exceeds `uniform [N]` times the total.

    Its weight is positive. Searches in two levels: first the group, then the entry in the group.
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
    """The first index along axis 0, i32 `[N]`, of positive weight whose cumulative sum `passing` exceeds `target [N]`;
    the last of positive weight if rounding leaves every sum below the target."""
    positive = weight > 0
    passed = (passing > target) & positive
    last = weight.shape[0] - 1 - jnp.argmax(jnp.flip(positive, axis=0), axis=0)
    return jnp.where(jnp.any(passed, axis=0), jnp.argmax(passed, axis=0), last).astype(jnp.int32)
