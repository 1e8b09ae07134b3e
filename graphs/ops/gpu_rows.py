"""Sums on CUDA, in Pallas for Triton: their order depends on what is summed alone, not on how much lies beside it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_engine.graphs.ops.gpu_call import Ref, kernel_call, load, store

_SPAN = 64  # values that a program adds one after the other
_COLUMNS = 128  # sums of a program
_SHAPE: dict[str, Any] = {"warps": 4, "stages": 1}


def gpu_rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype, *, interpret: bool = False
) -> jax.Array:
    """`graphs.ops.norms.rms_norm` of `x f32 [..., D]`, rounded to `dtype`."""
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, dtype)
    call = kernel_call(
        norm_kernel, eps=eps, grid=(len(rows),), out_shape=shape, interpret=interpret, **_SHAPE
    )
    out: jax.Array = call(rows, weight)
    return out.reshape(x.shape)


def gpu_sum_last(values: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`graphs.ops.fixed_order_sums.sum_last`."""
    rows = values.reshape(-1, values.shape[-1])
    shape = jax.ShapeDtypeStruct((len(rows),), values.dtype)
    call = kernel_call(row_sum_kernel, grid=(len(rows),), out_shape=shape, interpret=interpret, **_SHAPE)
    out: jax.Array = call(rows)
    return out.reshape(*values.shape[:-1], 1)


def gpu_sum_middle(values: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`graphs.ops.fixed_order_sums.sum_middle`: spans of `[A, M, C]`, then the sums of spans."""
    while values.shape[1] > 1:
        count, spans = len(values), pl.cdiv(values.shape[1], _SPAN)
        columns = values.shape[2]
        grid = (pl.cdiv(columns, _COLUMNS), spans, count)
        shape = jax.ShapeDtypeStruct((count, spans, columns), values.dtype)
        call = kernel_call(span_sum_kernel, grid=grid, out_shape=shape, interpret=interpret, **_SHAPE)
        values = call(values)
    return values[:, 0]


def norm_kernel(
    x_ref: Ref,  # [N, D]
    weight_ref: Ref,  # [D]
    out_ref: Ref,  # [N, D]
    *,
    eps: float,
) -> None:
    """One row."""
    x, at, inside = _row(x_ref)
    weight = load(weight_ref, at[1:], inside)
    scale = lax.rsqrt(jnp.sum(x * x) / x_ref.shape[1] + eps)
    store(out_ref, at, x * scale * weight, inside)


def row_sum_kernel(
    values_ref: Ref,  # [N, D]
    out_ref: Ref,  # [N]
) -> None:
    """One row."""
    values, at, _ = _row(values_ref)
    out_ref[at[0]] = jnp.sum(values)


def _row(ref: Ref) -> tuple[jax.Array, tuple[Any, jax.Array], jax.Array]:
    """This program's row of `[N, D]`, zeros behind it, where it lies, and which of it lies inside."""
    width = ref.shape[1]
    at = pl.program_id(0), jnp.arange(1 << (width - 1).bit_length())
    inside = at[1] < width
    return load(ref, at, inside), at, inside


def span_sum_kernel(
    values_ref: Ref,  # [A, M, C]
    out_ref: Ref,  # [A, J, C]
) -> None:
    """Columns of one span, in order."""
    column = pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
    span, place, (_, size, columns) = pl.program_id(1), pl.program_id(2), values_ref.shape

    def value(index: Any) -> jax.Array:
        return load(values_ref, (place, index, column), (column < columns) & (index < size))

    total = functools.reduce(jnp.add, [value(span * _SPAN + index) for index in range(_SPAN)])
    store(out_ref, (place, span, column), total, column < columns)
