"""Recurrent layers with a memory in C++ (`native/recurrent.cc`): one call for all that stands between two products.

The library is built and registered outside (`xla_engine.runner.native_library.build`), once for each instruction set.
A position has the same bits in prefill, decode and verify steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.recurrent.kind import DeltaWeights, MambaWeights, RecurrentState, RecurrentWeights
from xla_engine.graphs.recurrent.mamba import scaled
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm, Recurrent
from xla_engine.graphs.row_state.rows import Extents

DELTA_NET, DELTA_NET_OUTPUTS = "xla_engine_delta_net", "xla_engine_delta_net_outputs"
MAMBA, MAMBA_OUTPUTS = "xla_engine_mamba", "xla_engine_mamba_outputs"
_VECTOR = 16  # floats


def has_native_rule(form: Recurrent) -> bool:
    """Whether the heads' sizes are multiples of the vector width, as the C++ kernels need; true without a rule."""
    return isinstance(form, ConvolutionForm) or has_native_layer(form)


def has_native_layer(form: Recurrent) -> bool:
    """Whether a C++ kernel runs the layer."""
    if isinstance(form, ConvolutionForm):
        return False
    return form.key_dim % _VECTOR == 0 and form.value_dim % _VECTOR == 0


def native_layer(
    form: Recurrent,
    weights: RecurrentWeights,
    state: RecurrentState,
    projected: jax.Array,
    lanes: Extents,
    isa: str,
) -> tuple[RecurrentState, jax.Array]:
    """The positions of lanes, and the states of their slots, in place. isa: selects the library.

    projected: `[N, projected features]`. Returns states and outputs `[N, inner features]`, zero in padding rows.
    """
    assert state.memory is not None
    target = DELTA_NET if isinstance(form, DeltaForm) else MAMBA
    results = (*_results(form, projected), _like(state.inputs), _like(state.memory))
    call = jax.ffi.ffi_call(f"{target}_{isa}", results, input_output_aliases={10: 2, 11: 3})
    given = _given(form, weights, projected)
    out, _, inputs, memory = call(*given, *lanes, state.inputs, state.memory, **_sizes(form))
    return RecurrentState(inputs, memory), out


def native_outputs(
    form: Recurrent,
    weights: RecurrentWeights,
    state: RecurrentState,
    projected: jax.Array,
    lanes: Extents,
    isa: str,
) -> jax.Array:
    """The outputs of `native_layer` without changing the states; used lanes must have distinct slots."""
    assert state.memory is not None
    target = DELTA_NET_OUTPUTS if isinstance(form, DeltaForm) else MAMBA_OUTPUTS
    call = jax.ffi.ffi_call(f"{target}_{isa}", _results(form, projected))
    given = _given(form, weights, projected)
    out: jax.Array = call(*given, *lanes, state.inputs, state.memory, **_sizes(form))[0]
    return out


def _results(form: Recurrent, projected: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Outputs, and room for the convolution, decays and rates."""
    assert isinstance(form, (DeltaForm, MambaForm))
    decays = form.decay_features if isinstance(form, DeltaForm) else form.value_heads
    rows, room = len(projected), form.mixed_features + decays + form.value_heads
    return tuple(jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in (form.inner_features, room))


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.float32)


def _given(form: Recurrent, weights: RecurrentWeights, projected: jax.Array) -> tuple[jax.Array, ...]:
    nothing = jnp.zeros(0, jnp.float32)
    assert isinstance(weights, (DeltaWeights, MambaWeights))
    skip = nothing
    if isinstance(form, MambaForm):
        assert isinstance(weights, MambaWeights)
        projected, skip = scaled(form, projected), weights.skip
    bias = nothing if weights.convolution_bias is None else weights.convolution_bias
    norm = nothing if weights.norm is None else weights.norm
    return projected, weights.convolution, bias, weights.decay, weights.step_bias, skip, norm


def _sizes(form: Recurrent) -> dict[str, Any]:
    assert isinstance(form, (DeltaForm, MambaForm))
    least, most = form.step_limits if isinstance(form, MambaForm) else (0.0, 0.0)
    return {
        "key_heads": form.key_heads,
        "eps": np.float32(form.norm_eps),
        "rate_factor": np.float32(form.rate_factor if isinstance(form, DeltaForm) else 1.0),
        "least": np.float32(least),
        "most": np.float32(most),
        "gates_last": isinstance(form, MambaForm) and form.norm == "plain",
    }
