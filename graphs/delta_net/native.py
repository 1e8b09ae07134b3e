"""The gated delta rule in C++ for XLA:CPU: one call per layer (`native/delta.cc`), for prefill and decode alike.

`xla_engine.runner.native_library.build` builds and registers the library; a graph only names its target.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.config import DeltaForm
from xla_engine.graphs.ops.norms import flatly
from xla_engine.graphs.row_state.lanes import Extents

DELTA_RULE = "xla_engine_delta_rule"
DELTA_OUTPUTS = "xla_engine_delta_outputs"
_VECTOR = 16  # floats


def fits(form: DeltaForm) -> bool:
    """Whether the heads' sizes are multiples of the vector width, as the C++ kernels need."""
    return form.key_dim % _VECTOR == 0 and form.value_dim % _VECTOR == 0


class Heads(NamedTuple):
    """The inputs of the rule for N positions, float32.

    q, k: `[N, Hk, Dk]`, normalised, q also scaled. v: `[N, Hv, Dv]`. rate: `[N, Hv]`, in (0, 1).
    log_decay: `[N, Hv]`, at most 0. Consecutive value heads share a key head.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rate: jax.Array
    log_decay: jax.Array


def native_rule(memory: jax.Array, heads: Heads, lanes: Extents, isa: str) -> tuple[jax.Array, jax.Array]:
    """Run the positions of lanes on the memory `[B, Hv, Dk, Dv]` of their slots, in place, float32.

    isa: selects the library. Returns memory and outputs `[N, Hv, Dv]`, zero in padding rows.
    """
    results = (_like(heads.v), _like(memory))
    call = jax.ffi.ffi_call(f"{DELTA_RULE}_{isa}", results, input_output_aliases={8: 1})
    out, memory = call(*_given(heads), *lanes, memory)
    return memory, out


def native_outputs(memory: jax.Array, heads: Heads, lanes: Extents, isa: str) -> jax.Array:
    """The outputs of `native_rule` without changing the memory; used lanes must have distinct slots."""
    call = jax.ffi.ffi_call(f"{DELTA_OUTPUTS}_{isa}", _like(heads.v))
    out: jax.Array = call(*_given(heads), *lanes, memory)
    return out


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.float32)


def _given(heads: Heads) -> tuple[jax.Array, ...]:
    q, k, v, rate, log_decay = heads
    return q, k, v, flatly(jnp.exp, log_decay), rate
