"""Calls of Pallas kernels for CUDA, lowered through Triton: once for each shape in a program, not in every layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Ref = Any  # a Pallas reference: an array in device memory inside a kernel


@functools.lru_cache(256)
def kernel_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int,
    interpret: bool,
    stages: int = 3,
    aliases: tuple[tuple[int, int], ...] = (),
    **static: Any,
) -> Callable[..., Any]:
    """A function of arrays, or None for one that is missing. aliases: inputs and the outputs whose memory they are.

    static: further arguments of the kernel.
    """
    return jax.jit(
        pl.pallas_call(
            functools.partial(kernel, **static),
            grid=grid,
            out_shape=out_shape,
            input_output_aliases=dict(aliases),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=kernel.__name__,
        )
    )


def load(ref: Ref, at: tuple[Any, ...], mask: jax.Array | None = None) -> jax.Array:
    """Zero where not `mask`."""
    return plgpu.load(ref.at[at]) if mask is None else plgpu.load(ref.at[at], mask=mask, other=0)


def store(ref: Ref, at: tuple[Any, ...], values: jax.Array, mask: jax.Array | None = None) -> None:
    """Where `mask`, rounded to the reference's dtype."""
    plgpu.store(ref.at[at], values.astype(ref.dtype), mask=mask)


def dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product in float32, exact for bfloat16 but for the sums."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)
