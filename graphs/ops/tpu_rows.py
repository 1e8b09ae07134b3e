"""Sums on a TPU, in Pallas: their order depends on the length of a row alone, not on how many rows lie beside it.

A row lies in one sublane of the vector registers. Eight rows are summed at a time, by the same instructions whatever
their number: registers are added from the first to the last, then the lanes of one register are reduced. Rows that are
longer than `_SPAN` are summed span by span. Written out as additions, each halving would be an operation of its own,
whose fixed cost is a microsecond (findings/tpu.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_ROWS = 8  # sublanes of a register
_SPAN = 32768  # values of a row in one call of the kernel
_BLOCK = 1 << 19  # bytes of the rows of one call

Ref = Any  # a Pallas reference: an array in the core's memory inside a kernel


def tpu_rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype, *, interpret: Any = False
) -> jax.Array:
    """`graphs.ops.norms.rms_norm` of `x f32 [..., D]`, rounded to `dtype`."""
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    if width > _SPAN:
        scale = lax.rsqrt(tpu_sum_last(x * x, interpret=interpret) / width + eps)
        return (x * scale * weight).astype(dtype)
    block = _block(len(rows), width)
    padded = _padded(rows, block)
    out = pl.pallas_call(
        functools.partial(_norm_kernel, eps=eps),
        grid=(len(padded) // block,),
        in_specs=[
            pl.BlockSpec((block, width), lambda at: (at, 0)),
            pl.BlockSpec((1, width), lambda at: (0, 0)),
        ],
        out_specs=pl.BlockSpec((block, width), lambda at: (at, 0)),
        out_shape=jax.ShapeDtypeStruct(padded.shape, dtype),
        scratch_shapes=[pltpu.VMEM((block, 1), jnp.float32)],
        cost_estimate=_cost(padded, padded.nbytes + padded.size * dtype.itemsize),
        interpret=interpret,
        name="rms_norm",
    )(padded, weight.reshape(1, width))
    return out[: len(rows)].reshape(x.shape)


def tpu_sum_last(values: jax.Array, *, interpret: Any = False) -> jax.Array:
    """`graphs.ops.fixed_order_sums.sum_last`."""
    rows, width = values.reshape(-1, values.shape[-1]), values.shape[-1]
    span = min(width, _SPAN)
    block = _block(len(rows), span)
    padded = _padded(rows, block)
    out = pl.pallas_call(
        functools.partial(_sum_kernel, width=width),
        grid=(len(padded) // block, pl.cdiv(width, span)),
        in_specs=[pl.BlockSpec((block, span), lambda at, part: (at, part))],
        out_specs=pl.BlockSpec((block, 1), lambda at, part: (at, 0)),
        out_shape=jax.ShapeDtypeStruct((len(padded), 1), jnp.float32),
        cost_estimate=_cost(padded, padded.nbytes),
        interpret=interpret,
        name="row_sum",
    )(padded)
    return out[: len(rows)].reshape(*values.shape[:-1], 1)


def _norm_kernel(x_ref: Ref, weight_ref: Ref, out_ref: Ref, scale_ref: Ref, *, eps: float) -> None:
    """Rows of a block `[block, D]`. scale_ref: what each is multiplied by, `[block, 1]`."""

    def eight(index: int, carry: int) -> int:
        at = pl.ds(index * _ROWS, _ROWS)
        x = x_ref[at, :]
        scale_ref[at, :] = lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / x_ref.shape[1] + eps)
        return carry

    lax.fori_loop(0, x_ref.shape[0] // _ROWS, eight, 0)
    out_ref[...] = (x_ref[...] * scale_ref[...] * weight_ref[...]).astype(out_ref.dtype)


def _sum_kernel(values_ref: Ref, out_ref: Ref, *, width: int) -> None:
    """A span of the rows of a block `[block, span]`, added to the spans before it: `[block, 1]`. width: of a row."""
    part, span = pl.program_id(1), values_ref.shape[1]
    column = part * span + lax.broadcasted_iota(jnp.int32, (_ROWS, span), 1)

    def eight(index: int, carry: int) -> int:
        at = pl.ds(index * _ROWS, _ROWS)
        values = values_ref[at, :]
        if width % span:  # behind the row lies anything
            values = jnp.where(column < width, values, 0.0)
        own = jnp.sum(values, axis=1, keepdims=True)
        out_ref[at, :] = jnp.where(part == 0, own, out_ref[at, :] + own)
        return carry

    lax.fori_loop(0, values_ref.shape[0] // _ROWS, eight, 0)


def _block(rows: int, width: int) -> int:
    """How many rows a call of the kernel sums: a multiple of eight, of 16 if there are several calls, because rows in
    bfloat16 share words."""
    most = max(2 * _ROWS, _BLOCK // (4 * width) // (2 * _ROWS) * 2 * _ROWS)
    return min(most, -(-rows // _ROWS) * _ROWS)


def _padded(rows: jax.Array, block: int) -> jax.Array:
    missing = -len(rows) % block
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _cost(values: jax.Array, moved: int) -> pl.CostEstimate:
    return pl.CostEstimate(flops=2 * values.size, bytes_accessed=moved, transcendentals=len(values))
