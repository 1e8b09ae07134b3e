"""The threshold of top-k and top-p on a TPU, in one Pallas kernel.

The logits of eight rows stay in the core's memory while both bisections pass over them: from the main memory they are
read once. As operations of XLA, each of the 64 passes would be several, whose fixed cost is a microsecond
(findings/tpu.md). A row lies in one sublane: its sums are added in an order that depends on the vocabulary alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xla_engine.graphs.ops.reductions import from_ordered_bits, ordered_bits

_ROWS = 8  # sublanes of a register
_CHUNK = 1024  # logits of a row that are added to the same number of sums at a time
_PASSES = 32  # of a bisection of 32 bits
_OPERATIONS = 6  # for each logit in a pass
_ONE = 0x3F800000  # the bits of 1.0

Ref = Any  # a Pallas reference: an array in the core's memory inside a kernel


def tpu_threshold(
    logits: jax.Array,
    peak: jax.Array,
    temperature: jax.Array,
    wanted: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """`graphs.sampling.threshold.bisect` of `logits [V, N]`; the others are `[N]`."""
    vocabulary, rows = logits.shape
    numbers = jnp.stack([peak, temperature, wanted.astype(jnp.float32), top_p, min_p], axis=1)  # [N, 5]
    more, behind = -rows % _ROWS, -vocabulary % _CHUNK
    by_row = jnp.pad(logits.T, ((0, more), (0, behind)), constant_values=-jnp.inf)
    numbers = jnp.pad(numbers, ((0, more), (0, 0)), constant_values=1.0)
    found: jax.Array = pl.pallas_call(
        functools.partial(_kernel, vocabulary=vocabulary),
        grid=(len(by_row) // _ROWS,),
        in_specs=[
            pl.BlockSpec((_ROWS, by_row.shape[1]), lambda at: (at, 0)),
            pl.BlockSpec((_ROWS, numbers.shape[1]), lambda at: (at, 0)),
        ],
        out_specs=pl.BlockSpec((_ROWS, 1), lambda at: (at, 0)),
        out_shape=jax.ShapeDtypeStruct((len(by_row), 1), jnp.float32),
        cost_estimate=pl.CostEstimate(
            flops=2 * _PASSES * _OPERATIONS * by_row.size,
            bytes_accessed=by_row.nbytes,
            transcendentals=_PASSES * by_row.size,
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=3 * _ROWS * by_row.shape[1] * 4 + (4 << 20)),
        interpret=interpret,
        name="threshold",
    )(by_row, numbers)
    return found[:rows, 0]


def _kernel(logits_ref: Ref, numbers_ref: Ref, out_ref: Ref, *, vocabulary: int) -> None:
    """Eight rows `[8, V]`. numbers_ref: `[8, 5]`."""
    peak, temperature, wanted, top_p, min_p = (numbers_ref[:, at : at + 1] for at in range(5))  # [8, 1]

    def over(combine: Callable[..., jax.Array], start: float, value: Callable[..., jax.Array]) -> jax.Array:
        """`combine` of `value` of all chunks, from the first to the last: `[8, chunk]`."""

        def step(index: jax.Array, so_far: jax.Array) -> jax.Array:
            at = pl.multiple_of(index * _CHUNK, _CHUNK)
            return combine(so_far, value(logits_ref[:, pl.ds(at, _CHUNK)]))

        chunks = logits_ref.shape[1] // _CHUNK
        return lax.fori_loop(0, chunks, step, jnp.full((_ROWS, _CHUNK), start, jnp.float32))

    def total(value: Callable[..., jax.Array]) -> jax.Array:
        return jnp.sum(over(jnp.add, 0.0, value), axis=1, keepdims=True)

    def last_true(holds: Callable[..., jax.Array], lowest: int, highest: int) -> jax.Array:
        """As `graphs.sampling.threshold._last_true`."""

        def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # upper mean without overflow
            enough = holds(middle)
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

        bounds = (jnp.full((_ROWS, 1), each, jnp.int32) for each in (lowest, highest))
        return lax.fori_loop(0, _PASSES, narrow, tuple(bounds))[0]

    order = last_true(
        lambda bits: total(lambda x: jnp.where(ordered_bits(x) >= bits, 1.0, 0.0)) >= wanted,
        -(2**31),
        2**31 - 1,
    )
    kth = jnp.where(wanted < vocabulary, from_ordered_bits(order), -jnp.inf)

    def weight(x: jax.Array) -> jax.Array:
        found = jnp.exp((x - peak) / temperature)
        return jnp.where((x >= kth) & (found >= min_p), found, 0.0)

    def heavy(x: jax.Array, least: jax.Array) -> jax.Array:
        found = weight(x)
        return jnp.where(found >= least, found, 0.0)

    target = top_p * total(weight)

    def enough(bits: jax.Array) -> jax.Array:
        least = lax.bitcast_convert_type(bits, jnp.float32)
        return total(lambda x: heavy(x, least)) >= target

    least = lax.bitcast_convert_type(last_true(enough, 0, _ONE), jnp.float32)
    smallest = over(jnp.minimum, jnp.inf, lambda x: jnp.where(weight(x) >= least, x, jnp.inf))
    nucleus = jnp.min(smallest, axis=1, keepdims=True)
    out_ref[...] = jnp.where(top_p < 1, nucleus, kth)
