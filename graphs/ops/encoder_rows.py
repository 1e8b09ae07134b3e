"""What stands between the products of an encoder, in C++ (`native/encoder.cc`) or by XLA."""

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.ops.norms import centred, rms_norm

ADDED_NORM, ACTIVATED = "xla_engine_added_norm", "xla_engine_activated"
_KINDS = ("gelu", "gelu_tanh", "relu")  # of activations, by their number in C++


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
    x: jax.Array, bias: jax.Array, kind: str, dtype: jnp.dtype, native: tuple[str, jax.Array] | None
) -> jax.Array:
    """The activation of `x + bias`, `[N, F]`, in `dtype`. native: as in `added_norm`."""
    if native is None:
        x = x + bias
        out = jax.nn.relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=kind == "gelu_tanh")
        return out.astype(dtype)
    isa, live = native
    call = jax.ffi.ffi_call(f"{ACTIVATED}_{isa}", jax.ShapeDtypeStruct(x.shape, dtype))
    found: jax.Array = call(x, bias, live, kind=np.int64(_KINDS.index(kind)))
    return found
