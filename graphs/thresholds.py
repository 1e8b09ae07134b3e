"""Which tokens top-k and top-p keep: a threshold on the logits of each row.

On the logits themselves: what is divided by the temperature in two places may be rounded in two ways.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from graphs.rows import SamplingRows
from graphs.sums import sum_first
from graphs.vocabulary import along, columns, cumulative, flat, largest, total

_CANDIDATES = 128  # most likely tokens among which top-k and top-p are looked for first
_GROUP = 8  # rows that are bisected together


def threshold(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, rows: SamplingRows, concerned: jax.Array
) -> jax.Array:
    """Smallest of `logits [V, N]` per row that top-k and top-p keep; values that tie with it stay. f32 `[N]`.

    peak `[N]`: the largest logit. temperature `[N]`, positive. concerned bool `[N]`: rows whose result is used.

    Most rows are decided by their most likely candidates. A row that is not (a top-k beyond them, a nucleus wider
    than them) is decided by bisection over the whole vocabulary; it is the row itself that decides which.
    """
    vocabulary = logits.shape[0]
    count = min(_CANDIDATES, vocabulary)
    best, _ = largest(logits, count)  # [C, N], descending
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    limited = wanted < vocabulary
    kth = jnp.take_along_axis(best, jnp.clip(wanted - 1, 0, count - 1)[None], axis=0)[0]
    kth = jnp.where(limited, kth, -jnp.inf)
    weight = jnp.where(best >= kth, likelihood(best, peak, temperature, rows.min_p), 0.0)
    everything = total(likelihood(logits, peak, temperature, rows.min_p))
    reached = cumulative(weight) >= rows.top_p * jnp.where(limited, sum_first(weight), everything)
    nucleus = jnp.take_along_axis(best, jnp.argmax(reached, axis=0)[None], axis=0)[0]
    nucleus = jnp.where(rows.top_p < 1, nucleus, -jnp.inf)
    decided = (~limited | (wanted <= count)) & ((rows.top_p >= 1) | jnp.any(reached, axis=0))
    found = jnp.maximum(kth, nucleus)
    undecided = concerned & ~decided
    return lax.cond(
        jnp.any(undecided),
        lambda: _search_undecided(found, undecided, logits, peak, temperature, wanted, rows),
        lambda: found,
    )


def likelihood(logits: jax.Array, peak: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """Probability relative to that of the largest logit `peak [N]`, which gets exactly 1; zero below `min_p`."""
    found = jnp.exp((flat(logits) - along(peak)) / along(temperature))
    return columns(jnp.where(found >= along(min_p), found, 0.0), logits.shape)


def _search_undecided(
    found: jax.Array,
    undecided: jax.Array,
    logits: jax.Array,
    peak: jax.Array,
    temperature: jax.Array,
    wanted: jax.Array,
    rows: SamplingRows,
) -> jax.Array:
    """`found [N]` with the undecided rows decided by bisection, `_GROUP` rows at a time.

    A group's columns fit into the processor's cache, and its shape does not depend on N.
    """
    width = found.shape[0]
    count = jnp.sum(undecided, dtype=jnp.int32)
    order = jnp.argsort(~undecided, stable=True)  # the undecided rows first
    order = jnp.pad(order, (0, -width % _GROUP), constant_values=width)

    def decide(group: jax.Array, found: jax.Array) -> jax.Array:
        mine = lax.dynamic_slice(order, (group * _GROUP,), (_GROUP,))
        row = jnp.minimum(mine, width - 1)
        values = bisect(
            logits[:, row], peak[row], temperature[row], wanted[row], rows.top_p[row], rows.min_p[row]
        )
        # Groups may reach into decided rows, which keep what they have.
        target = jnp.where((mine < width) & undecided[row], mine, width)
        return found.at[target].set(values, mode="drop")

    return lax.fori_loop(0, (count + _GROUP - 1) // _GROUP, decide, found)


def bisect(
    logits: jax.Array,
    peak: jax.Array,
    temperature: jax.Array,
    wanted: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """`threshold` for any row, in 32 passes over the vocabulary for each of top-k and top-p that it wants.

    wanted i32 `[N]`: top-k, or the size of the vocabulary for no limit.
    """
    kth = lax.cond(
        jnp.any(wanted < logits.shape[0]),
        lambda: _kth_largest(logits, wanted),
        lambda: jnp.full(peak.shape, -jnp.inf, jnp.float32),
    )
    weight = jnp.where(logits >= kth, likelihood(logits, peak, temperature, min_p), 0.0)
    target = top_p * total(weight)

    def enough(bits: jax.Array) -> jax.Array:
        return total(jnp.where(weight >= lax.bitcast_convert_type(bits, jnp.float32), weight, 0.0)) >= target

    # Bits of numbers that are not negative compare as the numbers do.
    least = lax.bitcast_convert_type(_last_true(enough, jnp.zeros_like(wanted), 0x3F800000), jnp.float32)
    nucleus = jnp.min(jnp.where(weight >= least, logits, jnp.inf), axis=0)
    return jnp.where(top_p < 1, nucleus, kth)


def _kth_largest(values: jax.Array, k: jax.Array) -> jax.Array:
    """The `k [N]`-th largest of `values [V, N]` per column, f32 `[N]`."""
    order = _ordered_bits(values)

    def enough(bits: jax.Array) -> jax.Array:
        return total(jnp.where(order >= bits, 1.0, 0.0)) >= k.astype(jnp.float32)

    return _from_ordered_bits(_last_true(enough, jnp.full(k.shape, -(2**31), jnp.int32), 2**31 - 1))


def _last_true(holds: Callable[[jax.Array], jax.Array], lowest: jax.Array, highest: int) -> jax.Array:
    """Per column the largest integer from `lowest [N]` to `highest` for which `holds`, by bisection, i32 `[N]`.

    `holds` is true for `lowest`, and false above the first integer for which it is false.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # upper mean without overflow
        enough = holds(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return lax.fori_loop(0, 32, narrow, (lowest, jnp.full_like(lowest, highest)))[0]


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Integers that compare as the floats do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered_bits(order: jax.Array) -> jax.Array:
    """Inverse of `_ordered_bits`."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
