"""Products by the vector or tile instructions of a CPU, in bf16 or int8: one C++ call each, with norm and residual.

The weights of layers are packed when they are loaded (`pack`), in the order in which the kernels take them; the head's
are not, because the embedding may be the same array.

The library (`native/linear.cc`) is built and registered outside (`xla_engine.runner.native_library.build`), once for
each instruction set; a graph only names its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.experts.native import native_experts
from xla_engine.graphs.experts.routing import Experts, Route
from xla_engine.graphs.linear.int8 import Quantized
from xla_engine.graphs.linear.products import (
    Activation,
    FeatureMajor,
    Norm,
    Weight,
    activated,
    finished,
    kept_dtype,
)

HEAD, LINEAR, GATED_LINEAR = "xla_engine_head", "xla_engine_linear", "xla_engine_gated_linear"
_WHOLE = 32  # features of a task


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """See `graphs.projection.Products`. Rows of prefill and of decode run the same code: their bits agree.

    Rows that are not live are not multiplied: zeros stand in their places, or the residual. isa: the instruction set
    whose library serves.
    """

    isa: str
    live: jax.Array | None = None

    def for_rows(self, live: jax.Array) -> Self:
        return replace(self, live=live)

    def linear(
        self,
        weight: Weight,
        x: jax.Array | FeatureMajor,
        *,
        norm: Norm | None = None,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        assert not isinstance(x, FeatureMajor)
        if bias is not None:
            return finished(self.linear(weight, x, norm=norm), bias, residual)
        values, scale = _parts(weight)
        if len(values) % _WHOLE:  # not packed: a router of few experts
            return finished(self.head(weight, norm, x).T, None, residual)
        in_place = {} if residual is None else {5: 0}
        call = self._call(LINEAR, (len(x), len(values)), jnp.float32, in_place)
        return call(x, self._live(), _weight(norm), values, scale, _or_nothing(residual), eps=_eps(norm))

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: jax.Array | None = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        if bias is not None:
            both = self.linear(weight, x, norm=norm, bias=bias)
            return activated(both, activation).astype(kept_dtype(weight))
        values, scale = _parts(weight)
        call = self._call(GATED_LINEAR, (len(x), len(values) // 2), kept_dtype(weight))
        gelu = activation == "gelu_tanh"
        return call(x, self._live(), _weight(norm), values, scale, eps=_eps(norm), gelu=gelu)

    def experts(self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array) -> jax.Array:
        return native_experts(experts, x, routed, residual, isa=self.isa)

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """In the order that `packed.h` describes, if it has whole blocks of features."""
        if weight.shape[0] % _WHOLE:
            return weight
        words = weight.view(np.uint32)  # two or four neighbours of a row each
        blocks = words.reshape(-1, 16, words.shape[1]).swapaxes(1, 2)  # [F / 16, K words, 16]
        return np.ascontiguousarray(blocks).view(weight.dtype).reshape(weight.shape)

    def head(self, weight: Weight, norm: Norm | None, x: jax.Array) -> jax.Array:
        values, scale = _parts(weight)
        call = self._call(HEAD, (len(values), len(x)), jnp.float32)
        return call(x, self._live(), _weight(norm), values, scale, eps=_eps(norm))

    def _live(self) -> jax.Array:
        return jnp.zeros(0, bool) if self.live is None else self.live

    def _call(
        self,
        target: str,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        in_place: Mapping[int, int] | None = None,
    ) -> Callable[..., jax.Array]:
        """in_place: the argument whose memory the result takes, if any, by `ffi_call`."""
        result = jax.ShapeDtypeStruct(shape, dtype)
        return jax.ffi.ffi_call(f"{target}_{self.isa}", result, input_output_aliases=dict(in_place or {}))


def fits(config: ModelConfig, dtype: jnp.dtype, isa: str) -> bool:
    """Whether the model's products are whole blocks of weights in `dtype`, bfloat16 or int8: tiles, or vectors."""
    if dtype not in (jnp.bfloat16, jnp.int8):
        return False
    heads = config.num_attention_heads * config.head_dim
    widths = [config.hidden_size, config.intermediate_size, heads, config.qkv_features]
    if config.experts is not None:
        widths += [config.experts.moe_intermediate_size, config.experts.shared_expert_intermediate_size]
    if config.delta is not None:
        widths.append(config.delta.inner_features)
    if isa == "amx":
        return not any(width % (64 // dtype.itemsize) for width in widths)
    whole = [config.intermediate_size, *([] if config.experts is None else widths)]
    return not any(width % 16 for width in widths) and not any(width % _WHOLE for width in whole)


def _parts(weight: Weight) -> tuple[jax.Array, jax.Array]:
    """A weight and its scales, none in bf16."""
    return weight if isinstance(weight, Quantized) else (weight, _or_nothing(None))


def _weight(norm: Norm | None) -> jax.Array:
    return _or_nothing(None if norm is None else norm.weight)


def _or_nothing(array: jax.Array | None) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if array is None else array


def _eps(norm: Norm | None) -> np.float32:
    return np.float32(0.0 if norm is None else norm.eps)
