"""What stands between the products of an encoder, in C++ (`native/encoder.cc`) or by XLA."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.ops.norms import centred, rms_norm

ADDED_NORM, ACTIVATED = "xla_engine_added_norm", "xla_engine_activated"
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {  # in the order of their numbers in C++
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def layer_norm(x: jax.Array, weight: jax.Array, shift: jax.Array, eps: float) -> jax.Array:
    """LayerNorm with weight and bias (Ba et al. 2016) of `x [N, D]`, float32."""
    return rms_norm(centred(x), weight, eps) + shift


def added_norm(
    x: jax.Array,
    bias: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    shift: jax.Array,
    eps: float,
    native: tuple[str, jax.Array] | None,
) -> jax.Array:
    """`layer_norm` of `residual + (x + bias)`, float32 `[N, D]`.

    native: the instruction set of the C++ kernels and the rows that are live, bool `[N]`; the others become zeros.
    """
    if native is None:
        return layer_norm(residual + (x + bias), weight, shift, eps)
    isa, live = native
    call = jax.ffi.ffi_call(f"{ADDED_NORM}_{isa}", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    found: jax.Array = call(x, bias, residual, weight, shift, live, eps=np.float32(eps))
    return found


def activated(
    x: jax.Array,
    bias: jax.Array,
    kind: str,
    dtype: jnp.dtype,
    native: tuple[str, jax.Array] | None,
    *,
    gated: bool = False,
) -> jax.Array:
    """The activation of `x + bias`, `[N, F]`, in `dtype`. native: as in `added_norm`.

    gated: x has twice as many columns, the second half is multiplied by the activation of the first (Shazeer 2020).
    """
    width = x.shape[1] // 2 if gated else x.shape[1]
    if native is None:
        x = x + bias
        out = _ACTIVATIONS[kind](x[:, :width])
        return (out * x[:, width:] if gated else out).astype(dtype)
    isa, live = native
    call = jax.ffi.ffi_call(f"{ACTIVATED}_{isa}", jax.ShapeDtypeStruct((len(x), width), dtype))
    found: jax.Array = call(x, bias, live, kind=np.int64(tuple(_ACTIVATIONS).index(kind)))
    return found
