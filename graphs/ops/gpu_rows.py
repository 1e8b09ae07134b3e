"""Sums on CUDA, in Pallas for Triton: their order depends on what is summed alone, not on how much lies beside it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_SPAN = 64  # values that a program adds one after the other
_COLUMNS = 128  # sums of a program

Ref = Any  # a Pallas reference: an array in device memory inside a kernel


def gpu_rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype, *, interpret: bool = False
) -> jax.Array:
    """`graphs.ops.norms.rms_norm` of `x f32 [..., D]`, rounded to `dtype`."""
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, dtype)
    out: jax.Array = _call(functools.partial(norm_kernel, eps=eps), (len(rows),), shape, interpret)(
        rows, weight
    )
    return out.reshape(x.shape)


def gpu_sum_last(values: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`graphs.ops.fixed_order_sums.sum_last`."""
    rows = values.reshape(-1, values.shape[-1])
    shape = jax.ShapeDtypeStruct((len(rows),), values.dtype)
    out: jax.Array = _call(row_sum_kernel, (len(rows),), shape, interpret)(rows)
    return out.reshape(*values.shape[:-1], 1)


def gpu_sum_middle(values: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`graphs.ops.fixed_order_sums.sum_middle`: spans of `[A, M, C]`, then the sums of spans."""
    while values.shape[1] > 1:
        count, spans = len(values), pl.cdiv(values.shape[1], _SPAN)
        columns = values.shape[2]
        grid = (pl.cdiv(columns, _COLUMNS), spans, count)
        shape = jax.ShapeDtypeStruct((count, spans, columns), values.dtype)
        values = _call(span_sum_kernel, grid, shape, interpret)(values)
    return values[:, 0]


def _call(kernel: Callable[..., None], grid: tuple[int, ...], shape: Any, interpret: bool) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=getattr(kernel, "func", kernel).__name__,
    )


def norm_kernel(
    x_ref: Ref,  # [N, D]
    weight_ref: Ref,  # [D]
    out_ref: Ref,  # [N, D]
    *,
    eps: float,
) -> None:
    """One row."""
    x, at, inside = _row(x_ref)
    weight = plgpu.load(weight_ref.at[at[1]], mask=inside, other=0.0)
    scale = lax.rsqrt(jnp.sum(x * x) / x_ref.shape[1] + eps)
    plgpu.store(out_ref.at[at], (x * scale * weight).astype(out_ref.dtype), mask=inside)


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
    return plgpu.load(ref.at[at], mask=inside, other=0.0), at, inside


def span_sum_kernel(
    values_ref: Ref,  # [A, M, C]
    out_ref: Ref,  # [A, J, C]
) -> None:
    """Columns of one span, in order."""
    column = pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
    span, place, (_, size, columns) = pl.program_id(1), pl.program_id(2), values_ref.shape

    def load(index: Any) -> jax.Array:
        inside = (column < columns) & (index < size)
        return plgpu.load(values_ref.at[place, index, column], mask=inside, other=0.0)

    total = functools.reduce(jnp.add, [load(span * _SPAN + index) for index in range(_SPAN)])
    plgpu.store(out_ref.at[place, span, column], total, mask=column < columns)
