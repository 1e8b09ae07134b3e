"""The gated delta rule on XLA:CPU: one C++ call per layer (`native/delta.cc`), for prefill and decode alike.

The library is built and registered outside (`xla_engine.runner.native_library.build`); a graph only names its target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xla_engine.graphs.config import DeltaForm

DELTA_RULE = "xla_engine_delta_rule"
_VECTOR = 16  # floats


def fits(form: DeltaForm) -> bool:
    """Whether heads are whole vectors."""
    return form.key_dim % _VECTOR == 0 and form.value_dim % _VECTOR == 0


def native_rule(
    memory: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    *,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
    isa: str,
) -> tuple[jax.Array, jax.Array]:
    """Run the positions of lanes on the memory `[B, Hv, Dk, Dv]` of their slots, in place, float32.

    q, k `[N, Hk, Dk]`, v `[N, Hv, Dv]`, decay and rate `[N, Hv]`; `slot`, `start`, `count` `[P]` as in
    `graphs.delta_net.delta_prefill`. isa: the
    instruction set whose library serves. Returns memory and outputs `[N, Hv, Dv]`, zero in rows that are padding.
    """
    call = jax.ffi.ffi_call(
        f"{DELTA_RULE}_{isa}",
        (jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(memory.shape, jnp.float32)),
        input_output_aliases={8: 1},
    )
    out, memory = call(q, k, v, decay, rate, slot, start, count, memory)
    return memory, out
