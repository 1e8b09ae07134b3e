"""Linear projections, in the operand order that is fast.

Weights stay `[F, D]` as in the checkpoint. XLA:CPU re-packs the right operand of a product on every call and
keeps the left one, so with few rows the weight must be the left operand; with many rows the activations are.
Both operands have the weight's dtype and the result is float32: a mixed product is upcast as a whole on CPU.

The order is chosen per graph, never per call: the two need not agree in the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.experts.routing import Experts, Gather, Route, blocked_experts
from xla_engine.graphs.lora.form import Matrices
from xla_engine.graphs.lora.products import with_added
from xla_engine.graphs.ops.coded import Coded
from xla_engine.graphs.ops.int8 import Quantized, dequantized, grouped_product
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.sampling.logits import Logits
from xla_engine.graphs.sharding import Kind, Sharding

Activation = Literal["silu", "gelu_tanh", "relu2"]
Role = Literal["plain", "linear", "head", "scale", "adapter"]  # of an array, see `graphs.model.leaves.Leaf`
RowsOf = Callable[[jax.Array, jax.Array, int], jax.Array]  # of values, those of tokens; how many share a word


class Norm(NamedTuple):
    """The RMS norm that stands before a product: its weight `[D]` float32, what is added to the mean square, and a
    bias `[D]` float32 or None."""

    weight: jax.Array
    eps: float
    bias: jax.Array | None = None


Weight = jax.Array | Quantized | Coded  # coded ones are for products in C++


class FeatureMajor(NamedTuple):
    """Rows as `[F, N]`, between two products with the weights on the left.

    Turned to `[N, F]` they would be copied, and XLA:CPU would take another product, with other bits for other N.
    """

    values: jax.Array


Input = jax.Array | FeatureMajor
Term = jax.Array | None  # that is added to a product


class Products(Protocol):
    """The products of a decoder, with their norms, biases and residuals.

    x is `[N, D]`, float32 or the weight's dtype, or what `gated` returned. What a row becomes is a function of that
    row, to the bit: law 1 rests on it.
    """

    @property
    def name(self) -> str:
        """Their value of `linear_backend`."""
        ...

    @property
    def live(self) -> jax.Array | None:
        """The rows whose results are read, bool `[N]`; None: all."""
        ...

    @property
    def isa(self) -> str | None:
        """The instruction set of their C++ kernels; None without kernels."""
        ...

    @property
    def task(self) -> int:
        """Features in one task of a product: if several devices share its features, each has whole tasks."""
        ...

    def for_rows(self, live: jax.Array) -> Self:
        """The same products if only the rows `live [N]` are read; the others are finite."""
        ...

    def with_adapters(self, adapter: jax.Array | None) -> Self:
        """The same with LoRA adapters, for rows in lanes of equal size. adapter: i32 `[G]`, the adapter slot of each
        lane, from 1; 0 is none. None: no row has any."""
        ...

    def of_weight(self, matrices: Matrices | None) -> Self:
        """The same for the weight to which these matrices of adapters belong; None: adapters leave it as it is."""
        ...

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        """`weight [F, D]` times x, normalised before, plus `bias [F]`, plus `residual [N, F]`: float32 `[N, F]`."""
        ...

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> Input:
        """`activation(gate) * up`, both linear in x, for a product of the weight's dtype: `[N, F]` (Shazeer 2020).

        `weight [2 F, D]` and `bias [2 F]` hold the gates first.
        """
        ...

    def experts(
        self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
    ) -> jax.Array:
        """`residual` plus the weighted sum of what each row's experts make of `x [N, D]`: float32 `[N, D]`.

        gather: brings the hidden features of several devices together, each of which has some of either product's;
        residual and result are then a device's own features.
        """
        ...

    def pack(self, values: np.ndarray, role: Role = "linear") -> np.ndarray:
        """An array of the same shape, as products want it: a layer's weight `[F, D]`, for `linear` and `gated`; the
        head's `[V, D]`, for `head` and `embedded`; or the scales `[F, G]` of either in int8."""
        ...

    def head(self, weight: Weight, norm: Norm, x: jax.Array, sharding: Sharding | None = None) -> Logits:
        """`weight [V, D]` of the head times the norm of x, float32.

        sharding: each device has some rows of the weight, and gets the others' results; None: all are here.
        """
        ...

    def embedded(self, weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        """The rows `tokens [N]` of `weight [V, D]` of the head, where it is the embedding: float32 `[N, D]`.

        sharding: as in `head`.
        """
        ...


@dataclass(frozen=True, slots=True)
class XlaProducts:
    """Products by XLA, in one operand order for a whole graph. `weight_left`: the weights are the left operands.

    All rows are multiplied: only experts know which are live.
    """

    weight_left: bool
    live: jax.Array | None = None
    adapter: jax.Array | None = None
    matrices: Matrices | None = None
    name = "xla"
    isa = None
    task = 1

    def for_rows(self, live: jax.Array) -> Self:
        return replace(self, live=live)

    def with_adapters(self, adapter: jax.Array | None) -> Self:
        return replace(self, adapter=adapter)

    def of_weight(self, matrices: Matrices | None) -> Self:
        return replace(self, matrices=matrices)

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        out = self._product(weight, x if isinstance(x, FeatureMajor) else normed(x, norm))
        # Without the barrier XLA swaps the operands to get rid of the transpose (findings/products.md).
        out = lax.optimization_barrier(out).T if self.weight_left else out
        return self._adapted(finished(out, bias, residual), x, norm, features_first=False)

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> Input:
        both = self._product(weight, normed(x, norm))  # `[2 F, N]` where weights are left, else `[N, 2 F]`
        if bias is not None:
            both = both + (bias[:, None] if self.weight_left else bias)
        both = self._adapted(both, x, norm, features_first=self.weight_left)
        if not self.weight_left:
            return activated(both, activation).astype(kept_dtype(weight))
        # Features stay in front until the next product: nothing of size F is transposed. Gates and ups are flat: an
        # exponential over rows of no more than 8 entries is rounded otherwise (findings/same_bits.md).
        flat = lax.optimization_barrier(both.reshape(2, -1))  # [2, F N]
        hidden = (activate(flat[0], activation) * flat[1]).astype(kept_dtype(weight))
        return FeatureMajor(lax.optimization_barrier(hidden).reshape(-1, len(x)))

    def experts(
        self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
    ) -> jax.Array:
        if isinstance(experts.down, Quantized):
            return blocked_experts(experts, x, routed, residual, gather)
        return lax.platform_dependent(
            cuda=lambda: _gpu_experts(experts, x, routed, residual, gather),
            default=lambda: blocked_experts(experts, x, routed, residual, gather),
        )

    def pack(self, values: np.ndarray, role: Role = "linear") -> np.ndarray:
        return values

    def head(self, weight: Weight, norm: Norm, x: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        return feature_major(weight, normed(x, norm), sharding)

    def embedded(self, weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        return looked_up(weight, tokens, sharding)

    def _product(self, weight: Weight, x: Input) -> jax.Array:
        """`[F, N]` where weights are the left operands, else `[N, F]`."""
        if self.weight_left or isinstance(x, FeatureMajor):
            return feature_major(weight, x)
        return rows_first(weight, x)

    def _adapted(self, out: jax.Array, x: Input, norm: Norm | None, *, features_first: bool) -> jax.Array:
        """A product, and what the rows' adapters add to it."""
        if self.adapter is None or self.matrices is None:
            return out
        rows = x.values.T if isinstance(x, FeatureMajor) else normed(x, norm)
        return with_added(out, rows, self.adapter, self.matrices, features_first=features_first)


# Features from which more of them change no bit of XLA:CPU's products: with the rows on the left it chooses a way by
# their number, in float32 up to 144 of them (findings/many_devices.md).
LEAST = 192

WEIGHT_LEFT = XlaProducts(weight_left=True)  # decode: as fast as weights can be read, to some 64 rows
ROWS_LEFT = XlaProducts(weight_left=False)  # prefill: faster from some 128 rows on


def feature_major(weight: Weight, x: Input, sharding: Sharding | None = None) -> jax.Array:
    """`weight [F, D]` times `x [N, D]` transposed: float32 `[F, N]`, the order the weight-left product yields.

    sharding: as in `Products.head`.
    """
    assert not isinstance(weight, Coded)
    rows, axis = (x.values, 0) if isinstance(x, FeatureMajor) else (x, 1)
    if isinstance(weight, Quantized):
        out = grouped_product(weight, rows, axis, weight_left=True)
    else:
        out = _contract(weight, rows.astype(weight.dtype), axis)
    return out if sharding is None else sharding.gather(out, "vocabulary", axis=0)


def rows_first(weight: Weight, x: jax.Array) -> jax.Array:
    """`x [N, D]` times `weight [F, D]`: float32 `[N, F]`."""
    assert not isinstance(weight, Coded)
    if isinstance(weight, Quantized):
        return grouped_product(weight, x, 1, weight_left=False)
    return _contract(x.astype(weight.dtype), weight)


def _gpu_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None
) -> jax.Array:
    from xla_engine.graphs.experts.gpu import gpu_experts  # Pallas takes a while to import

    return gpu_experts(experts, x, routed, residual, gather)


def gathered(hidden: Input, sharding: Sharding, kind: Kind) -> Input:
    """What `Products.gated` returned, with the features of all devices."""
    if isinstance(hidden, FeatureMajor):
        return FeatureMajor(sharding.gather(hidden.values, kind, axis=0))
    return sharding.gather(hidden, kind)


def kept_dtype(weight: Weight) -> jnp.dtype:
    """What the hidden features of a gated product are handed on in: int8 products round by themselves."""
    if isinstance(weight, Coded):
        return weight.form.rows
    return jnp.dtype(jnp.float32) if isinstance(weight, Quantized) else weight.dtype


def looked_up(weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
    """The rows `tokens [N]` of an embedding `[V, D]`: float32 `[N, D]`. sharding: as in `Products.embedded`."""
    return look_up(weight, tokens, sharding, lambda values, tokens, _: values[tokens])


def look_up(weight: Weight, tokens: jax.Array, sharding: Sharding | None, rows: RowsOf) -> jax.Array:
    """The same, with `rows(values, tokens)` to find rows of values or scales in their order."""

    def found(tokens: jax.Array) -> jax.Array:
        assert not isinstance(weight, Coded)
        if isinstance(weight, Quantized):
            return dequantized(rows(weight.values, tokens, 4), rows(weight.scale, tokens, 1))
        return rows(weight, tokens, 4 // weight.dtype.itemsize).astype(jnp.float32)

    return found(tokens) if sharding is None else sharding.looked_up(found, tokens)


def normed(x: jax.Array, norm: Norm | None) -> jax.Array:
    if norm is None:
        return x
    found = rms_norm(x, norm.weight, norm.eps)
    return found if norm.bias is None else found + norm.bias


def finished(out: jax.Array, bias: Term, residual: Term) -> jax.Array:
    """A product `[N, F]` with what is added to it."""
    out = out if bias is None else out + bias
    return out if residual is None else residual + out


def activate(gate: jax.Array, activation: Activation) -> jax.Array:
    """SiLU, GELU approximated by tanh (Hendrycks and Gimpel 2016), or the square of ReLU (So et al. 2021)."""
    if activation == "relu2":
        return jnp.square(jax.nn.relu(gate))
    return jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)


def activated(both: jax.Array, activation: Activation) -> jax.Array:
    """Gates and ups side by side `[N, 2 F]` become `activation(gate) * up [N, F]`."""
    gate, up = jnp.split(both, 2, axis=-1)
    return activate(gate, activation) * up


def _contract(left: jax.Array, right: jax.Array, right_axis: int = 1) -> jax.Array:
    """Contract left's last axis with `right_axis` of right: `[M, K] x [N, K] -> [M, N]` in float32."""
    # HIGHEST only matters for float32 operands: it forbids TF32 on GPUs.
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((1,), (right_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
