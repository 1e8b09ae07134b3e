"""Products in which each row may have its own LoRA adapter (Hu et al. 2021; in one batch: Chen et al. 2023).

For a row with an adapter, B (A x) is added in float32, x being the input of the product. A row without one keeps every
bit of the product. The result of a row depends only on the row: in C++ each sum has a fixed order, and XLA's products
process each lane separately.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.experts.routing import parts_of
from xla_engine.graphs.linear.native import (
    NativeProducts,
    eps_of,
    features_of,
    norm_weight,
    or_nothing,
)
from xla_engine.graphs.linear.products import (
    Activation,
    FeatureMajor,
    Input,
    Norm,
    Products,
    Term,
    Weight,
    XlaProducts,
    finished,
    kept_dtype,
    normed,
)
from xla_engine.graphs.lora.form import Matrices

LORA, LINEAR_LORA, GATED_LORA = "xla_engine_lora", "xla_engine_linear_lora", "xla_engine_gated_lora"


def with_adapters(products: Products, adapter: jax.Array | None) -> Products:
    """`products` with adapters, for rows in lanes of equal size.

    adapter: i32 `[G]`, the adapter slot of each lane, from 1; 0 is none. None: returns `products` unchanged.
    """
    if adapter is None:
        return products
    if isinstance(products, NativeProducts):
        return NativeLora(products.isa, products.live, adapter)
    assert isinstance(products, XlaProducts)
    return XlaLora(products.weight_left, products.live, adapter)


def of_weight(products: Products, matrices: Matrices | None) -> Products:
    """`products` for the weight to which these matrices belong; None: it has no adapters."""
    if matrices is None or not isinstance(products, NativeLora | XlaLora):
        return products
    return replace(products, matrices=matrices)


@dataclass(frozen=True, slots=True)
class NativeLora(NativeProducts):
    """In C++ (`native/lora.h`), within the call of the product: A is read once for all rows of an adapter."""

    adapter: jax.Array | None = None
    matrices: Matrices | None = None

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        if self.matrices is None:
            return NativeProducts.linear(self, weight, x, norm=norm, bias=bias, residual=residual)
        assert not isinstance(x, FeatureMajor)
        if bias is not None:
            return finished(self.linear(weight, x, norm=norm), bias, residual)
        (values, scale), features = parts_of(weight), features_of(weight)
        shape, ends = (len(x), features), np.array(self.matrices.ends)
        if features % self.task:
            out = NativeProducts.linear(self, weight, x, norm=norm, residual=residual)
            call = self._call(LORA, shape, jnp.float32, {7: 0}, weight)
            adapted, *rest = self._adapters(x)
            return call(x, adapted, norm_weight(norm), *rest, out, eps=eps_of(norm), ends=ends)
        in_place = {} if residual is None else {5: 0}
        call = self._call(LINEAR_LORA, shape, jnp.float32, in_place, weight)
        given = x, self._live(), norm_weight(norm), values, scale, or_nothing(residual)
        return call(*given, *self._adapters(x), eps=eps_of(norm), ends=ends)

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        if self.matrices is None or bias is not None:
            return NativeProducts.gated(self, weight, x, norm=norm, bias=bias, activation=activation)
        values, scale = parts_of(weight)
        shape = (len(x), features_of(weight) // 2)
        call = self._call(GATED_LORA, shape, kept_dtype(weight), weight=weight)
        gelu, ends = activation == "gelu_tanh", np.array(self.matrices.ends)
        given = x, self._live(), norm_weight(norm), values, scale
        return call(*given, *self._adapters(x), eps=eps_of(norm), ends=ends, gelu=gelu)

    def _adapters(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Which rows of `x` have an adapter, which one, and the matrices of all."""
        adapter, matrices = self.adapter, self.matrices
        assert adapter is not None and matrices is not None
        rows = jnp.repeat(adapter, len(x) // len(adapter))
        adapted = rows > 0 if self.live is None else (rows > 0) & self.live
        return adapted, rows, matrices.down, matrices.up, matrices.ranks


@dataclass(frozen=True, slots=True)
class XlaLora(XlaProducts):
    """In XLA: gathers the matrices of each lane's adapter."""

    adapter: jax.Array | None = None
    matrices: Matrices | None = None

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        out = XlaProducts.linear(self, weight, x, norm=norm, bias=bias, residual=residual)
        return out if self.matrices is None else self._added(out, x, norm, 0)

    def gates_and_ups(self, weight: Weight, x: jax.Array, norm: Norm | None, bias: Term) -> jax.Array:
        both = XlaProducts.gates_and_ups(self, weight, x, norm, bias)
        return both if self.matrices is None else self._added(both, x, norm, int(self.weight_left))

    def _added(self, out: jax.Array, x: Input, norm: Norm | None, axis: int) -> jax.Array:
        """`out` plus the adapters' outputs. axis: that of its rows."""
        adapter, matrices = self.adapter, self.matrices
        assert adapter is not None and matrices is not None
        rows = x.values.T if isinstance(x, FeatureMajor) else normed(x, norm)
        lanes = lax.optimization_barrier(rows.astype(jnp.float32)).reshape(len(adapter), -1, rows.shape[1])
        at = jnp.maximum(adapter - 1, 0)
        down, up = (each[at].astype(jnp.float32) for each in (matrices.down, matrices.up))
        hidden = _product("gtk,gprk->gptr", lanes, down)
        parts = [
            _product("gtr,grf->gtf", hidden[:, part], up[:, :, begin:end])
            for part, (begin, end) in enumerate(zip((0, *matrices.ends), matrices.ends, strict=False))
        ]
        more = lax.optimization_barrier(jnp.concatenate(parts, axis=2).reshape(len(rows), -1))
        out = lax.optimization_barrier(out)
        adapted = jnp.repeat(adapter > 0, lanes.shape[1])
        if axis:
            return jnp.where(adapted, out + more.T, out)
        return jnp.where(adapted[:, None], out + more, out)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
