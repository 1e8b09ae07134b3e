"""Routed experts on a CPU, in bf16: one C++ call per layer (`native/experts.cc`).

The library is built and registered outside (`xla_engine.runner.native_library.build`); a graph only names its target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.experts.routing import Experts, Route

EXPERTS = "xla_engine_experts"


def native_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, *, isa: str
) -> jax.Array:
    """See `graphs.moe.blocked_experts`. D and F are multiples of 32. isa: the instruction set whose library serves."""
    call = jax.ffi.ffi_call(f"{EXPERTS}_{isa}", jax.ShapeDtypeStruct(residual.shape, jnp.float32))
    none = jnp.zeros((0, 0), jnp.float32)
    biases = (none if bias is None else bias for bias in (experts.gate_up_bias, experts.down_bias))
    weights = (experts.gate_up, experts.down, *biases)
    result: jax.Array = call(
        x.astype(experts.gate_up.dtype), *routed, *weights, residual, limit=np.float32(experts.limit or 0)
    )
    return result
