"""The smallest logit of each row that top-k and top-p keep. Logits are vocabulary-major, float32 `[V, N]`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_first
from xla_engine.graphs.ops.reductions import (
    as_columns,
    as_rows,
    cumulative,
    from_ordered_bits,
    largest,
    ordered_bits,
    per_column,
    total,
)
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.target import platform

_CANDIDATES = 128  # most likely tokens among which the threshold is searched first
_GROUP = 8  # rows that are bisected together on CPUs


def threshold(
    logits: jax.Array, peak: jax.Array, temperature: jax.Array, rows: SamplingRows, concerned: jax.Array
) -> jax.Array:
    """The smallest of `logits [V, N]` per row that top-k and top-p keep, f32 `[N]`; equal logits are kept, too.

    peak `[N]`: the largest logit. temperature `[N]`, positive. concerned bool `[N]`: rows whose result is used.

    It applies to the logits before the temperature, because a division in two places may be rounded in two ways.

    For most rows the most likely candidates suffice. If top-k or the nucleus exceeds them, the threshold is found by
    bisection over the whole vocabulary; which way is taken depends only on the row itself.
    """
    vocabulary = logits.shape[0]
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    if platform() == "tpu":  # bisects in one pass over the main memory, which no shortcut beats
        from xla_engine.graphs.sampling.tpu import tpu_threshold  # Pallas takes a while to import

        return tpu_threshold(logits, peak, temperature, wanted, rows.top_p, rows.min_p)
    count = min(_CANDIDATES, vocabulary)
    best, _ = largest(logits, count)  # [C, N], descending
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
    open_ones = _Search(found, undecided, logits, peak, temperature, wanted, rows)
    return lax.cond(
        jnp.any(undecided),
        lambda: lax.platform_dependent(open_ones, cpu=_search_in_groups, default=_search_together),
        lambda: found,
    )


def likelihood(logits: jax.Array, peak: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """The probability relative to that of the largest logit `peak [N]`, which is exactly 1; zero below `min_p`."""
    found = jnp.exp((as_rows(logits) - per_column(peak)) / per_column(temperature))
    return as_columns(jnp.where(found >= per_column(min_p), found, 0.0), logits.shape)


class _Search(NamedTuple):
    """The thresholds `found [N]`, which rows are `undecided [N]`, and as in `threshold` and `bisect`."""

    found: jax.Array
    undecided: jax.Array
    logits: jax.Array
    peak: jax.Array
    temperature: jax.Array
    wanted: jax.Array
    rows: SamplingRows


@jax.jit  # traced only once, not in every CPU program
def _search_together(at: _Search) -> jax.Array:
    """`found [N]` with the thresholds of undecided rows, by bisection of all rows at once, without a loop."""
    values = bisect(at.logits, at.peak, at.temperature, at.wanted, at.rows.top_p, at.rows.min_p)
    return jnp.where(at.undecided, values, at.found)


def _search_in_groups(at: _Search) -> jax.Array:
    """The same, `_GROUP` rows at a time: their columns fit into a CPU cache, and no shape depends on N."""
    found, undecided, logits, peak, temperature, wanted, rows = at
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
        # The last group may contain decided rows, which keep their threshold.
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
    """`threshold` for any row, in 32 passes over the vocabulary each for top-k and top-p. wanted i32 `[N]`: top-k, or
    the size of the vocabulary for no limit."""
    kth = lax.cond(
        jnp.any(wanted < logits.shape[0]),
        lambda: _kth_largest(logits, wanted),
        lambda: jnp.full(peak.shape, -jnp.inf, jnp.float32),
    )
    weight = jnp.where(logits >= kth, likelihood(logits, peak, temperature, min_p), 0.0)
    target = top_p * total(weight)

    def enough(bits: jax.Array) -> jax.Array:
        return total(jnp.where(weight >= lax.bitcast_convert_type(bits, jnp.float32), weight, 0.0)) >= target

    # The bits of non-negative floats compare like the floats.
    least = lax.bitcast_convert_type(_last_true(enough, jnp.zeros_like(wanted), 0x3F800000), jnp.float32)
    nucleus = jnp.min(jnp.where(weight >= least, logits, jnp.inf), axis=0)
    return jnp.where(top_p < 1, nucleus, kth)


def _kth_largest(values: jax.Array, k: jax.Array) -> jax.Array:
    """The `k [N]`-th largest of `values [V, N]` per column, f32 `[N]`."""
    order = ordered_bits(values)

    def enough(bits: jax.Array) -> jax.Array:
        return total(jnp.where(order >= bits, 1.0, 0.0)) >= k.astype(jnp.float32)

    return from_ordered_bits(_last_true(enough, jnp.full(k.shape, -(2**31), jnp.int32), 2**31 - 1))


def _last_true(holds: Callable[[jax.Array], jax.Array], lowest: jax.Array, highest: int) -> jax.Array:
    """Per column, by bisection, the largest integer from `lowest [N]` to `highest` for which `holds`, i32 `[N]`.

    `holds` must be true for `lowest`, and stay false above the first integer for which it is false.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the answer lies in [low, high]
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # upper mean without overflow
        enough = holds(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    def search(*bounds: jax.Array, unroll: bool) -> jax.Array:
        return lax.fori_loop(0, 32, narrow, bounds, unroll=unroll)[0]

    return lax.platform_dependent(
        lowest,
        jnp.full_like(lowest, highest),
        cpu=functools.partial(search, unroll=False),
        default=functools.partial(search, unroll=True),  # a loop keeps a program out of a CUDA graph
    )
