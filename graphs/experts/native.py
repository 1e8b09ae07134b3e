"""Routed experts on CPUs, in bf16, int8 or the encoding of a file: one C++ call per layer (`native/experts_layer.h`).

`xla_engine.runner.native_library.build` builds and registers the library; a graph only names its target.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.experts.routing import Experts, Gather, Route
from xla_engine.graphs.ops.coded import Coded
from xla_engine.graphs.ops.int8 import Quantized

EXPERTS = "xla_engine_experts"
GATED_EXPERTS, DOWN_EXPERTS = "xla_engine_gated_experts", "xla_engine_down_experts"


def native_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, *, isa: str
) -> jax.Array:
    """As `graphs.experts.routing.blocked_experts`. D and F must be multiples of 32. isa: selects the library."""
    call = jax.ffi.ffi_call(
        f"{EXPERTS}_{_kind(experts.down)}_{isa}", jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    )
    biases = (_or_nothing(bias) for bias in (experts.gate_up_bias, experts.down_bias))
    weights = (*_parts(experts.gate_up), *_parts(experts.down), *biases)
    result: jax.Array = call(
        x.astype(experts.row_dtype), *routed, *weights, residual, limit=np.float32(experts.limit or 0)
    )
    return result


def shared_native_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather, *, isa: str
) -> jax.Array:
    """The same in two calls, for devices that each have some features of both products; the bits are the same.

    gather: as in `graphs.linear.products.Products.experts`; rows without an expert are zero in its input.
    """
    gate_up, down, gate_up_bias, down_bias, limit = experts
    inner = _rows(gate_up) * residual.shape[1] // (2 * _rows(down))
    gated = jax.ffi.ffi_call(
        f"{GATED_EXPERTS}_{_kind(gate_up)}_{isa}",
        jax.ShapeDtypeStruct((routed.expert.size, inner), experts.row_dtype),
    )
    hidden: jax.Array = gated(
        x.astype(experts.row_dtype),
        routed.expert,
        *_parts(gate_up),
        _or_nothing(gate_up_bias),
        limit=np.float32(limit or 0),
    )
    call = jax.ffi.ffi_call(
        f"{DOWN_EXPERTS}_{_kind(down)}_{isa}", jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    )
    result: jax.Array = call(gather(hidden), *routed, *_parts(down), _or_nothing(down_bias), residual)
    return result


def _kind(weight: jax.Array | Quantized | Coded) -> str:
    """The library: weights that are unpacked to bf16 are multiplied where those in bf16 are."""
    if isinstance(weight, Coded) and weight.form.order == "fours":
        return "fours"
    return "int8" if isinstance(weight, Quantized) else "bf16"


def _rows(weight: jax.Array | Quantized | Coded) -> int:
    """The rows of all experts."""
    return weight.form.features if isinstance(weight, Coded) else math.prod(_parts(weight)[0].shape[:2])


def _parts(weight: jax.Array | Quantized | Coded) -> tuple[jax.Array, jax.Array]:
    """A weight and its scales, which are empty unless it is int8."""
    if isinstance(weight, Quantized):
        return weight
    return weight.values if isinstance(weight, Coded) else weight, jnp.zeros((0, 0), jnp.bfloat16)


def _or_nothing(bias: jax.Array | None) -> jax.Array:
    return jnp.zeros((0, 0), jnp.float32) if bias is None else bias
