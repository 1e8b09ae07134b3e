"""Calls of Pallas kernels for CUDA, lowered through Triton: once for each shape in a program, not in every layer.

XLA launches each kernel as a programmatic dependent of the one before: it waits, as its first instruction, until that
one has ended and its results can be read. Here each kernel also lets the next one start early, which then only waits,
so that nothing is launched while the device is idle (findings/gpu.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xla_engine.graphs.target import devices

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

    def run(*refs: Ref) -> None:
        if not interpret and starts_early():
            _start_next(refs[-1])
        kernel(*refs, **static)

    return jax.jit(
        pl.pallas_call(
            run,
            grid=grid,
            out_shape=out_shape,
            input_output_aliases=dict(aliases),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=kernel.__name__,
        )
    )


@functools.cache
def starts_early() -> bool:
    """Whether the device knows dependent launches: NVIDIA's, from compute capability 9 on."""
    device: Any = devices()[0]
    return "NVIDIA" in device.device_kind and float(device.compute_capability) >= 9


def _start_next(out_ref: Ref) -> None:
    """Let the next kernel start when all programs of this one have come here or ended.

    The instruction needs a result that is used: by a store of nothing.
    """
    index = jnp.arange(32)
    word = jax.ShapeDtypeStruct(index.shape, jnp.int32)
    (never,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        args=[index],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[word],
    )
    at = (index, *(0 for _ in out_ref.shape[1:]))
    store(out_ref, at, jnp.zeros(index.shape, out_ref.dtype), never != 0)


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
