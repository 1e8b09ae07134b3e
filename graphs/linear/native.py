"""Products by the vector or tile instructions of a CPU, in bf16 or int8: one C++ call each, with norm and residual.

Weights are packed when they are loaded (`pack`), in the order in which the kernels take them; where the head's are the
embedding too, its rows are gathered out of that order.

The library (`native/linear.h`) is built and registered outside (`xla_engine.runner.native_library.build`), once for
each instruction set; a graph only names its targets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.experts.routing import (
    Experts,
    Gather,
    Route,
    native_experts,
    parts_of,
    shared_native_experts,
)
from xla_engine.graphs.linear.products import (
    Activation,
    FeatureMajor,
    Input,
    Norm,
    Role,
    Term,
    Weight,
    activated,
    finished,
    kept_dtype,
    look_up,
)
from xla_engine.graphs.lora.form import Matrices
from xla_engine.graphs.ops.coded import Coded
from xla_engine.graphs.ops.int8 import Quantized
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sharding import Sharding

HEAD, LINEAR, GATED_LINEAR = "xla_engine_head", "xla_engine_linear", "xla_engine_gated_linear"
ROWS = "xla_engine_rows"
LORA, LINEAR_LORA, GATED_LORA = "xla_engine_lora", "xla_engine_linear_lora", "xla_engine_gated_lora"
_WHOLE = 32  # features of a task


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """See `graphs.linear.products.Products`. Rows of prefill and of decode run the same code: their bits agree.

    Rows that are not live are not multiplied: their results are zeros, or the residual. isa: the instruction set of
    the library. What adapters add is computed within the call of the product (`native/lora.h`): A is read once for all
    rows of an adapter.
    """

    isa: str
    live: jax.Array | None = None
    adapter: jax.Array | None = None
    matrices: Matrices | None = None
    name = "native"
    task = _WHOLE

    def for_rows(self, live: jax.Array) -> Self:
        return replace(self, live=live)

    def with_adapters(self, adapter: jax.Array | None) -> Self:
        return replace(self, adapter=adapter)

    def of_weight(self, matrices: Matrices | None) -> Self:
        return replace(self, matrices=matrices)

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        assert not isinstance(x, FeatureMajor)
        if bias is not None:
            return finished(self.linear(weight, x, norm=norm), bias, residual)
        (values, scale), shape = parts_of(weight), (len(x), features_of(weight))
        ends = self._ends()
        if shape[1] % _WHOLE:  # a router of few experts
            out = finished(self.head(weight, norm, x).values, None, residual)
            if not ends:
                return out
            call = self._call(LORA, shape, jnp.float32, {7: 0}, weight=weight)
            adapted, *rest = self._adapters(x)
            return call(x, adapted, norm_weight(norm), *rest, out, eps=eps_of(norm), **ends)
        in_place, target = {} if residual is None else {5: 0}, LINEAR_LORA if ends else LINEAR
        call = self._call(target, shape, jnp.float32, in_place, weight=weight)
        given = x, self._live(), norm_weight(norm), values, scale, or_nothing(residual)
        return call(*given, *self._adapters(x), eps=eps_of(norm), **ends)

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        if bias is not None:
            both = self.linear(weight, x, norm=norm, bias=bias)
            return activated(both, activation).astype(kept_dtype(weight))
        (values, scale), shape = parts_of(weight), (len(x), features_of(weight) // 2)
        ends = self._ends()
        call = self._call(GATED_LORA if ends else GATED_LINEAR, shape, kept_dtype(weight), weight=weight)
        given = x, self._live(), norm_weight(norm), values, scale
        gelu = activation == "gelu_tanh"
        return call(*given, *self._adapters(x), eps=eps_of(norm), gelu=gelu, **ends)

    def experts(
        self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
    ) -> jax.Array:
        if gather is None:
            return native_experts(experts, x, routed, residual, isa=self.isa)
        return shared_native_experts(experts, x, routed, residual, gather, isa=self.isa)

    def pack(self, values: np.ndarray, role: Role = "linear") -> np.ndarray:
        """In the order that `product.h` describes, as far as there are whole tasks."""
        if role == "scale":
            return _packed(values, np.dtype(np.uint16))
        if role == "plain":
            return values
        return _packed(values, np.dtype(np.uint32))  # two or four neighbours of a row together

    def pack_traced(self, weight: jax.Array, role: Role) -> jax.Array:
        """As `pack`, of a weight in bfloat16 inside a graph."""
        whole = _packed_rows(weight)
        pairs = weight[:whole].reshape(whole // 16, 16, weight.shape[1] // 2, 2).swapaxes(1, 2)
        return jnp.concatenate([pairs.reshape(whole, weight.shape[1]), weight[whole:]])

    def unpack(self, weight: np.ndarray, role: Role) -> np.ndarray:
        """The inverse of `pack`, of a weight in bfloat16."""
        whole = _packed_rows(weight)
        pairs = weight[:whole].reshape(whole // 16, weight.shape[1] // 2, 16, 2).swapaxes(1, 2)
        return np.concatenate([pairs.reshape(whole, weight.shape[1]), weight[whole:]])

    def head(
        self, weight: Weight, norm: Norm | None, x: jax.Array, sharding: Sharding | None = None
    ) -> ByRow:
        values, scale = parts_of(weight)
        call = self._call(HEAD, (len(x), features_of(weight)), jnp.float32, weight=weight)
        out = call(x, self._live(), norm_weight(norm), values, scale, eps=eps_of(norm))
        return ByRow(out if sharding is None else sharding.gather(out, "vocabulary", axis=1))

    def embedded(self, weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        if isinstance(weight, Coded):
            width = weight.form.width
            return look_up(
                weight.values,
                tokens,
                sharding,
                lambda values, tokens, _: self._call(ROWS, (len(tokens), width), jnp.float32, weight=weight)(
                    values, tokens
                ),
            )
        return look_up(weight, tokens, sharding, _unpacked)

    def _live(self) -> jax.Array:
        return or_nothing(self.live, bool)

    def _adapters(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Which rows of `x` have an adapter, which one, and the matrices of all; nothing without adapters."""
        if self.adapter is None or self.matrices is None:
            return ()
        rows = jnp.repeat(self.adapter, len(x) // len(self.adapter))
        adapted = rows > 0 if self.live is None else (rows > 0) & self.live
        return adapted, rows, *self.matrices[:3]

    def _ends(self) -> dict[str, np.ndarray]:
        """The further attribute of calls with adapters."""
        return {} if self.adapter is None or self.matrices is None else {"ends": np.array(self.matrices.ends)}

    def _call(
        self,
        target: str,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        in_place: Mapping[int, int] | None = None,
        weight: Weight | None = None,
    ) -> Callable[..., jax.Array]:
        """in_place: the argument whose memory the result takes, if any, by `ffi_call`. weight: its kind chooses the
        target."""
        result = jax.ShapeDtypeStruct(shape, dtype)
        name = target if weight is None else f"{target}_{kind_of(weight)}"
        return jax.ffi.ffi_call(f"{name}_{self.isa}", result, input_output_aliases=dict(in_place or {}))


def fits(config: ModelConfig, dtype: jnp.dtype, isa: str) -> bool:
    """Whether the model's products are whole blocks of weights in `dtype`, bfloat16 or int8: tiles, or vectors."""
    if dtype not in (jnp.bfloat16, jnp.int8):
        return False
    layers = {config.layer(index) for index in range(config.num_hidden_layers)}
    widths = [config.hidden_size, *(layer.intermediate_size for layer in layers)]
    widths += [layer.num_attention_heads * layer.head_dim for layer in layers]
    widths += [layer.qkv_features for layer in layers]
    widths += [] if config.latent is None else config.latent.widths(config.num_attention_heads)
    widths.append(config.hidden_size_per_layer_input)
    widths += [] if config.alternating is None else [config.alternating.laurel_rank]
    if config.experts is not None:
        widths += config.experts.widths
    if config.recurrent is not None:
        widths += [config.recurrent.inner_features, 0 if config.delta is None else config.delta.gate_rank]
    if isa == "amx" or dtype == jnp.int8:
        return not any(width % (64 // dtype.itemsize) for width in widths)
    whole = [config.intermediate_size, *(widths if config.experts or config.latent else [])]
    return not any(width % 16 for width in widths) and not any(width % _WHOLE for width in whole)


def _packed_rows(weight: np.ndarray | jax.Array) -> int:
    """How many rows of a weight `[F, D]` fill tasks."""
    return len(weight) // _WHOLE * _WHOLE


def _packed(weight: np.ndarray, word: np.dtype[Any]) -> np.ndarray:
    """`weight [F, D]` with its whole tasks as `[F / 16, D words, 16]`, in an array of its own shape."""
    if not (whole := _packed_rows(weight)):
        return weight
    words = np.ascontiguousarray(weight[:whole]).view(word)
    blocks = words.reshape(-1, 16, words.shape[1]).swapaxes(1, 2)
    packed = np.ascontiguousarray(blocks).view(weight.dtype).reshape(whole, -1)
    return packed if whole == len(weight) else np.concatenate([packed, weight[whole:]])


def _unpacked(values: jax.Array, rows: jax.Array, word: int) -> jax.Array:
    """The rows `rows [N]` of what `_packed` made of `[F, D]` with `word` values in a word: `[N, D]`."""
    width = values.shape[1]
    row, column = rows[:, None], jnp.arange(width, dtype=jnp.int32)
    within = (column // word * 16 + row % 16) * word + column % word  # of a block of sixteen rows
    packed = row < _packed_rows(values)
    at = jnp.where(packed, row // 16 * 16 + within // width, row), jnp.where(packed, within % width, column)
    return values.at[at].get(mode="promise_in_bounds")


def kind_of(weight: Weight) -> str:
    """The kind of a weight, by which targets are named."""
    if isinstance(weight, Coded):
        return "fours" if weight.form.order == "fours" else "coded"
    return "int8" if isinstance(weight, Quantized) else "bf16"


def features_of(weight: Weight) -> int:
    """F of a weight `[F, D]`."""
    return weight.form.features if isinstance(weight, Coded) else len(parts_of(weight)[0])


def norm_weight(norm: Norm | None) -> jax.Array:
    """The weight of a norm `[D]`, with a bias `[2, D]`, or an empty array without one."""
    if norm is None or norm.bias is None:
        return or_nothing(None if norm is None else norm.weight)
    return jnp.stack([norm.weight, norm.bias])


def or_nothing(array: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """An array, or an empty one where a call is given none."""
    return jnp.zeros(0, dtype) if array is None else array


def eps_of(norm: Norm | None) -> np.float32:
    """What a norm adds to the mean square."""
    return np.float32(0.0 if norm is None else norm.eps)
