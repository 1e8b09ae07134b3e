"""From logits to one token per row. Logits are vocabulary-major: float32 `[V, N]`.

Order: temperature, min-p, top-k, top-p, draw. Each row is a function of its own logits, parameters, seed and
position; `lax.cond` only decides whether work that no row wants is skipped, never what a row gets.

The draw inverts the cumulative distribution in vocabulary order with one uniform number per row, keyed by (seed,
position): a quarter of the cost of Gumbel noise over the whole vocabulary (findings/004). Everything that runs over
V works in blocks of 64 entries first, which XLA:CPU fuses into one pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from graphs.rows import SamplingRows
from graphs.sums import sum_first

_BLOCK = 64  # vocabulary entries per block (findings/004)
_CANDIDATES = 128  # most likely tokens among which top-k and top-p are looked for first


def sample(logits: jax.Array, rows: SamplingRows, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sample one token per row.

    position `[N]`: index of the new token in its sequence; noise is keyed by (seed, position) only.
    Returns token ids i32 `[N]` and raw log-probabilities f32 `[N]` (0 where no row wants one).
    """
    greedy = argmax(logits)
    token = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(logits, rows, position), greedy),
        lambda: greedy,
    )
    logprob = lax.cond(
        jnp.any(rows.wants_logprob),
        lambda: token_logprob(logits, token),
        lambda: jnp.zeros(token.shape, jnp.float32),
    )
    return token, logprob


def argmax(values: jax.Array) -> jax.Array:
    """Index of the largest of `values [V, N]` per column, lowest index on ties, i32 `[N]`.

    Two levels: maxima of blocks, then the winning block. One argmax over V carries indices through the whole
    reduction and is many times slower on CPU.
    """
    blocks = _blocks(values, -jnp.inf)
    winner = jnp.argmax(jnp.max(blocks, axis=1), axis=0).astype(jnp.int32)  # [N]
    return winner * _BLOCK + jnp.argmax(_take_block(blocks, winner), axis=0).astype(jnp.int32)


def token_logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probability of `token [N]` under the unscaled distribution, f32 `[N]`."""
    peak = jnp.max(logits, axis=0)
    total = _total(_relative(logits, peak))
    chosen = jnp.take_along_axis(logits, token[None, :], axis=0)[0]
    return chosen - peak - jnp.log(total)


def _draw(logits: jax.Array, rows: SamplingRows, position: jax.Array) -> jax.Array:
    """Draw from the restricted distribution, i32 `[N]`."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    peak = jnp.max(scaled, axis=0)
    threshold = lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1)),
        lambda: _threshold(scaled, peak, rows),
        lambda: jnp.full(peak.shape, -jnp.inf, jnp.float32),
    )
    weight = jnp.where(scaled >= threshold, _likelihood(scaled, peak, rows.min_p), 0.0)
    return _invert(weight, _uniform(rows.seed, position))


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, a function of its (seed `[2]`, position) alone, f32 `[N]`."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(one)(seed, position)


def _invert(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index at which the cumulative `weight [V, N]` passes `uniform [N]` of the total; its weight is positive.

    Two levels: the block whose cumulative sum passes, then the entry inside it.
    """
    blocks = _blocks(weight, 0.0)
    totals = jnp.sum(blocks, axis=1)
    cumulative = _cumulative(totals)  # [V / block, N]
    target = uniform * cumulative[-1]
    block = _first_passing(cumulative, totals, target)
    before = jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[None], axis=0)[0]
    inside = _take_block(blocks, block)  # [block, N]
    passed = jnp.where(block > 0, before, 0.0) + _cumulative(inside)
    return block * _BLOCK + _first_passing(passed, inside, target)


def _first_passing(cumulative: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """First index along axis 0 with positive weight whose cumulative sum passes `target [N]`, i32 `[N]`.

    Where rounding leaves every sum short of the target, the last index with positive weight.
    """
    positive = weight > 0
    passed = (cumulative > target) & positive
    last = weight.shape[0] - 1 - jnp.argmax(jnp.flip(positive, axis=0), axis=0)
    return jnp.where(jnp.any(passed, axis=0), jnp.argmax(passed, axis=0), last).astype(jnp.int32)


def _threshold(scaled: jax.Array, peak: jax.Array, rows: SamplingRows) -> jax.Array:
    """Smallest `scaled [V, N]` value per row that top-k and top-p keep; values that tie with it stay. f32 `[N]`.

    Most rows are decided by their most likely candidates. A row that is not (a top-k beyond them, a nucleus wider
    than them) is decided by bisection over the whole vocabulary; it is the row itself that decides which.
    """
    vocabulary = scaled.shape[0]
    count = min(_CANDIDATES, vocabulary)
    best = lax.top_k(scaled.T, count)[0].T  # [C, N], descending
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    limited = wanted < vocabulary
    kth = jnp.take_along_axis(best, jnp.clip(wanted - 1, 0, count - 1)[None], axis=0)[0]
    kth = jnp.where(limited, kth, -jnp.inf)
    weight = jnp.where(best >= kth, _likelihood(best, peak, rows.min_p), 0.0)
    everything = _total(_likelihood(scaled, peak, rows.min_p))
    reached = _cumulative(weight) >= rows.top_p * jnp.where(limited, sum_first(weight), everything)
    nucleus = jnp.take_along_axis(best, jnp.argmax(reached, axis=0)[None], axis=0)[0]
    nucleus = jnp.where(rows.top_p < 1, nucleus, -jnp.inf)
    decided = (~limited | (wanted <= count)) & ((rows.top_p >= 1) | jnp.any(reached, axis=0))
    threshold = jnp.maximum(kth, nucleus)
    return lax.cond(
        jnp.all(decided),
        lambda: threshold,
        lambda: jnp.where(decided, threshold, _threshold_by_bisection(scaled, peak, wanted, rows)),
    )


def _threshold_by_bisection(
    scaled: jax.Array, peak: jax.Array, wanted: jax.Array, rows: SamplingRows
) -> jax.Array:
    """`_threshold` for any row, in 64 passes over the vocabulary."""
    order = _ordered_bits(scaled)
    kth = _largest(order, jnp.ones_like(scaled), wanted.astype(jnp.float32))
    weight = jnp.where(order >= kth, _likelihood(scaled, peak, rows.min_p), 0.0)
    nucleus = _largest(order, weight, rows.top_p * jnp.sum(weight, axis=0))
    return _from_ordered_bits(jnp.where(rows.top_p < 1, jnp.maximum(kth, nucleus), kth))


def _likelihood(scaled: jax.Array, peak: jax.Array, min_p: jax.Array) -> jax.Array:
    """Probability relative to the most likely token, zero below `min_p`."""
    relative = _relative(scaled, peak)
    return jnp.where(relative >= min_p, relative, 0.0)


def _relative(values: jax.Array, peak: jax.Array) -> jax.Array:
    """`exp(values - peak)` of `values [V, N]`, `peak [N]`, computed as rows of 64 N entries.

    XLA:CPU unrolls an inner loop of up to 8 and then rounds the multiply-adds of its exponential differently, so that
    8 columns would get other bits than 16 (findings/011).
    """
    blocks = _blocks(values, 0.0)
    peaks = lax.optimization_barrier(jnp.tile(peak, _BLOCK))  # read along a row, not by index arithmetic
    relative = lax.optimization_barrier(jnp.exp(blocks.reshape(len(blocks), -1) - peaks))
    return relative.reshape(-1, peak.shape[0])[: values.shape[0]]


def _largest(order: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """Per column the largest t with `sum(weight[order >= t]) >= target`, i32 `[N]`.

    Bisection over the 32 bits of an ordered integer. With unit weights and target k it is the k-th largest value.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # upper mean without overflow
        enough = jnp.sum(jnp.where(order >= middle, weight, 0.0), axis=0) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    columns = order.shape[1]
    lowest = jnp.full((columns,), -(2**31), jnp.int32)
    highest = jnp.full((columns,), 2**31 - 1, jnp.int32)
    return lax.fori_loop(0, 32, narrow, (lowest, highest))[0]


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Integers that compare as the floats do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered_bits(order: jax.Array) -> jax.Array:
    """Inverse of `_ordered_bits`."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def _total(values: jax.Array) -> jax.Array:
    """Sum of non-negative `values [V, N]` per column, f32 `[N]`: over the blocks, then inside."""
    return sum_first(sum_first(_blocks(values, 0.0)))


def _cumulative(values: jax.Array) -> jax.Array:
    """Inclusive cumulative sums down the columns of `values [M, N]`, in blocks.

    Masked sums rather than `jnp.cumsum`, whose scan takes seconds to compile and orders sums by the array's length.
    """
    count, columns = values.shape
    if count > _BLOCK:
        blocks = _blocks(values, 0.0)  # [M / block, block, N]
        totals = jnp.sum(blocks, axis=1)
        before = _cumulative(totals) - totals
        return (_prefix_sums(blocks) + before[:, None]).reshape(-1, columns)[:count]
    return _prefix_sums(values[None])[0]


def _prefix_sums(blocks: jax.Array) -> jax.Array:
    """Inclusive sums along axis 1 of `blocks [M, block, N]`; one fused pass for short blocks."""
    size = blocks.shape[1]
    earlier = jnp.arange(size)[:, None] >= jnp.arange(size)  # [to, from]
    return jnp.sum(jnp.where(earlier[None, :, :, None], blocks[:, None], 0.0), axis=2)


def _blocks(values: jax.Array, fill: float) -> jax.Array:
    """`[V, N] -> [ceil(V / block), block, N]`, padded with `fill`."""
    count, columns = values.shape
    if missing := -count % _BLOCK:
        values = jnp.pad(values, ((0, missing), (0, 0)), constant_values=fill)
    return values.reshape(-1, _BLOCK, columns)


def _take_block(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block `index [N]` of each column of `blocks [M, block, N]`: `[block, N]`."""
    return jnp.take_along_axis(blocks, index[None, None, :], axis=0)[0]
