"""Products on the matrix tiles of a CPU, in bf16: one C++ call each, norm and residual included.

The library (`native/linear.cc`) is built and registered outside (`xla_engine.native`); a graph only names its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from graphs.config import ModelConfig
from graphs.moe import Experts, Route
from graphs.moe_native import native_experts
from graphs.projection import Activation, Norm, activated, finished

LINEAR, LINEAR_ADD, GATED_LINEAR = (
    "xla_engine_linear",
    "xla_engine_linear_add",
    "xla_engine_gated_linear",
)
_WHOLE = 32  # features of a tile


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """See `graphs.projection.Products`. Rows of prefill and of decode run the same code: their bits agree."""

    def linear(
        self,
        weight: jax.Array,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        if residual is None or bias is not None:
            return finished(self._feature_major(weight, x, norm).T, bias, residual)
        call = _call(LINEAR_ADD, residual.shape, jnp.float32)
        return call(x, _weight(norm), weight, residual, eps=_eps(norm))

    def gated(
        self,
        weight: jax.Array,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: jax.Array | None = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        if bias is not None:
            both = self.linear(weight, x, norm=norm, bias=bias)
            return activated(both, activation).astype(weight.dtype)
        call = _call(GATED_LINEAR, (x.shape[0], weight.shape[0] // 2), weight.dtype)
        return call(x, _weight(norm), weight, eps=_eps(norm), gelu=activation == "gelu_tanh")

    def experts(self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array) -> jax.Array:
        return native_experts(experts, x, routed, residual)

    def head(self, weight: jax.Array, norm: Norm, x: jax.Array) -> jax.Array:
        return self._feature_major(weight, x, norm)

    def _feature_major(self, weight: jax.Array, x: jax.Array, norm: Norm | None) -> jax.Array:
        call = _call(LINEAR, (weight.shape[0], x.shape[0]), jnp.float32)
        return call(x, _weight(norm), weight, eps=_eps(norm))


def fits(config: ModelConfig, dtype: jnp.dtype) -> bool:
    """Whether the model's products are whole tiles of bf16."""
    widths = [config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim]
    if config.experts is not None:
        widths += [config.experts.moe_intermediate_size, config.experts.shared_expert_intermediate_size]
    if config.delta is not None:
        widths.append(config.delta.inner_features)
    return dtype == jnp.bfloat16 and not any(width % _WHOLE for width in widths)


def _weight(norm: Norm | None) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if norm is None else norm.weight


def _eps(norm: Norm | None) -> np.float32:
    return np.float32(0.0 if norm is None else norm.eps)


def _call(target: str, shape: tuple[int, ...], dtype: DTypeLike) -> Callable[..., jax.Array]:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype))
