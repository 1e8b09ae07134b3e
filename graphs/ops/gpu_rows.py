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
_AHEAD = 8 << 20  # bytes that are read ahead: as many as a norm takes to read
_AHEAD_TILE = 1 << 14  # values that one program reads ahead

Ref = Any  # a Pallas reference: an array in device memory inside a kernel


def gpu_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    dtype: jnp.dtype,
    *,
    ahead: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`graphs.ops.norms.rms_norm` of `x f32 [..., D]`, rounded to `dtype`.

    ahead: a matrix of which some columns are read meanwhile into the device's cache, because a product with it comes
        next and few rows leave the device idle.
    """
    rows = x.reshape(-1, x.shape[-1])
    columns = 0 if ahead is None else (_AHEAD // (len(ahead) * ahead.dtype.itemsize)).bit_length()
    if ahead is None or columns == 0 or 1 << columns > ahead.shape[1]:  # the matrix is small
        ahead, tile = None, (0, 0)
    else:
        tile = _AHEAD_TILE >> (columns - 1), 1 << (columns - 1)
    others = 0 if ahead is None else pl.cdiv(len(ahead), tile[0])
    shape = jax.ShapeDtypeStruct(rows.shape, dtype)
    out: jax.Array
    out, *_ = _call(
        functools.partial(norm_kernel, eps=eps, tile=tile),
        (len(rows) + others,),
        (shape, jax.ShapeDtypeStruct((max(others, 1),), jnp.float32)),
        interpret,
    )(rows, weight, ahead)
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
    ahead_ref: Ref | None,  # [F, K]
    out_ref: Ref,  # [N, D]
    seen_ref: Ref,  # [A], of no meaning
    *,
    eps: float,
    tile: tuple[int, int],
) -> None:
    """One row, or a tile of the first columns of what is read ahead."""
    program, rows = pl.program_id(0), len(x_ref)

    @pl.when(program < rows)
    def _() -> None:
        x, at, inside = _row(x_ref, program)
        weight = plgpu.load(weight_ref.at[at[1]], mask=inside, other=0.0)
        scale = lax.rsqrt(jnp.sum(x * x) / x_ref.shape[1] + eps)
        plgpu.store(out_ref.at[at], (x * scale * weight).astype(out_ref.dtype), mask=inside)

    if ahead_ref is None:
        return

    @pl.when(program >= rows)
    def _() -> None:
        place, (height, width) = program - rows, tile
        row, column = place * height + jnp.arange(height)[:, None], jnp.arange(width)[None]
        inside = jnp.broadcast_to(row < len(ahead_ref), tile)
        found = plgpu.load(ahead_ref.at[row, column], mask=inside, other=0.0)
        seen_ref[place] = jnp.sum(found.astype(jnp.float32))


def row_sum_kernel(
    values_ref: Ref,  # [N, D]
    out_ref: Ref,  # [N]
) -> None:
    """One row."""
    values, at, _ = _row(values_ref, pl.program_id(0))
    out_ref[at[0]] = jnp.sum(values)


def _row(ref: Ref, row: jax.Array) -> tuple[jax.Array, tuple[Any, jax.Array], jax.Array]:
    """A row of `[N, D]`, zeros behind it, where it lies, and which of it lies inside."""
    width = ref.shape[1]
    at = row, jnp.arange(1 << (width - 1).bit_length())
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
