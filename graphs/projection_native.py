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

NORM_LINEAR, LINEAR_ADD, NORM_GATED = (
    "xla_engine_norm_linear",
    "xla_engine_linear_add",
    "xla_engine_norm_gated",
)
_WHOLE = 32  # features of a tile


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """See `graphs.projection.Products`. Rows of prefill and of decode run the same code: their bits agree."""

    def normed(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        return self.head(weight, norm, eps, x).T

    def added(self, weight: jax.Array, x: jax.Array, residual: jax.Array) -> jax.Array:
        return _call(LINEAR_ADD, residual.shape, jnp.float32)(x.astype(weight.dtype), weight, residual)

    def gated(
        self, gate_up: jax.Array, down: jax.Array, norm: jax.Array, eps: float, x: jax.Array
    ) -> jax.Array:
        shape = (x.shape[0], down.shape[1])
        hidden = _call(NORM_GATED, shape, down.dtype)(x, norm, gate_up, eps=np.float32(eps))
        return self.added(down, hidden, x)

    def head(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        shape = (weight.shape[0], x.shape[0])
        return _call(NORM_LINEAR, shape, jnp.float32)(x, norm, weight, eps=np.float32(eps))


def fits(config: ModelConfig, dtype: jnp.dtype) -> bool:
    """Whether the model's products are whole tiles of bf16."""
    widths = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return dtype == jnp.bfloat16 and not any(width % _WHOLE for width in widths)


def _call(target: str, shape: tuple[int, ...], dtype: DTypeLike) -> Callable[..., jax.Array]:
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype))
