"""Modules that stand in a layer in place of attention or of the MLP; linear weights are `[out, in]`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from xla_engine.graphs.config import DeltaForm, RoutedExperts
from xla_engine.graphs.delta_net.layer import DeltaWeights
from xla_engine.graphs.experts.routing import Experts, Gather, route
from xla_engine.graphs.linear.int8 import SUFFIX, Quantized
from xla_engine.graphs.linear.products import Norm, Products, Weight, gathered
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import flatly, rms_norm
from xla_engine.graphs.sharding import Sharding

_FLAT = 64  # copies of a lonely value whose exponential is taken


class RoutedMlp(nnx.Module):
    """A router and its experts, and the expert that every token takes."""

    def __init__(self, form: RoutedExperts, d: int, dtype: jnp.dtype, sharding: Sharding) -> None:
        self.form, self.sharding = form, sharding
        count, inner, shared = (
            form.num_experts,
            form.moe_intermediate_size,
            form.shared_expert_intermediate_size,
        )
        self.router = zeros((count, d), dtype)
        self.gate_up = zeros((count, 2 * inner, d), dtype)
        self.down = zeros((count, d, inner), dtype)
        if form.bias:  # vectors, and so float32
            self.router_bias = zeros((count,))
            self.gate_up_bias = zeros((count * 2 * inner,))
            self.down_bias = zeros((count * d,))
        if shared:
            self.shared_gate_up = zeros((2 * shared, d), dtype)
            self.shared_down = zeros((d, shared), dtype)
            self.shared_gate = zeros((1, d), dtype)

    def __call__(self, x: jax.Array, residual: jax.Array, norm: Norm | None, products: Products) -> jax.Array:
        """`residual [N, D]` plus what the experts make of the norm of `x [N, D]`."""
        form, sharding = self.form, self.sharding
        x = x if norm is None else rms_norm(x, *norm)
        logits = products.linear(self.router[...], x, bias=self.router_bias[...] if form.bias else None)
        routed = route(logits, form.num_experts_per_tok, renormalise=form.norm_topk_prob, live=products.live)
        experts = Experts(self.gate_up[...], self.down[...], limit=form.swiglu_limit)
        if form.bias:
            by_expert = (form.num_experts, -1)
            experts = experts._replace(
                gate_up_bias=self.gate_up_bias[...].reshape(by_expert),
                down_bias=self.down_bias[...].reshape(by_expert),
            )
        gather: Gather | None = None
        if sharding.devices is not None:
            gather = functools.partial(sharding.gather, kind="expert")
        out = products.experts(experts, x, routed, sharding.own(residual, "residual"), gather)
        out = sharding.gather(out, "residual")
        if form.shared_expert_intermediate_size:
            hidden = gathered(products.gated(self.shared_gate_up[...], x), sharding, "shared_expert")
            shared = sharding.gather(products.linear(self.shared_down[...], hidden), "residual")
            out = out + _sigmoid(sum_last(_rounded(x, self.shared_gate[...]))) * shared
        return out


class DeltaNet(nnx.Module):
    """A gated DeltaNet layer between its two products (`graphs.delta_net.layer`)."""

    def __init__(self, form: DeltaForm, d: int, dtype: jnp.dtype, sharding: Sharding) -> None:
        self.sharding = sharding
        self.projected = zeros((form.projected_features, d), dtype)
        self.convolution = zeros((form.mixed_features, form.kernel), dtype)
        self.decay = zeros((form.value_heads,))
        self.step_bias = zeros((form.value_heads,))
        self.scale = ones(form.value_dim)
        self.output = zeros((d, form.inner_features), dtype)

    def __call__(
        self,
        index: int,
        x: jax.Array,
        norm: Norm | None,
        attend: Callable[[int, jax.Array, DeltaWeights], jax.Array],
        products: Products,
    ) -> jax.Array:
        """The residual stream `x [N, D]` behind this layer; `attend` owns the state."""
        weights = DeltaWeights(
            self.convolution[...].astype(jnp.float32), self.decay[...], self.step_bias[...], self.scale[...]
        )
        out = attend(index, products.linear(self.projected[...], x, norm=norm), weights)
        out, own = self.sharding.gather(out, "values"), self.sharding.own(x, "residual")
        return self.sharding.gather(products.linear(self.output[...], out, residual=own), "residual")


def all_heads(attended: jax.Array, gate: jax.Array | None, sharding: Sharding) -> jax.Array:
    """What attention makes of all heads `[N, H Dh]`, multiplied by the sigmoid of its gates if there are any.

    attended, gate: the device's heads. XLA:CPU's exponential of a value may depend on the width of its row: with XLA's
    products the rows are those of one device.
    """
    if gate is None:
        return sharding.gather(attended, "queries")
    if sharding.least == 1:
        return sharding.gather(attended * jax.nn.sigmoid(gate), "queries")
    return sharding.gather(attended, "queries") * jax.nn.sigmoid(sharding.gather(gate, "queries"))


def zeros(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape, dtype))


def ones(size: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.ones((size,), jnp.float32))


def matrix(module: nnx.Module, name: str, shape: tuple[int, int], dtype: DTypeLike) -> None:
    """Give `module` the weight `name`, and scales of its rows where it is int8."""
    setattr(module, name, zeros(shape, dtype))
    if dtype == jnp.int8:
        setattr(module, name + SUFFIX, zeros(shape[:1]))


def weight_of(module: nnx.Module, name: str) -> Weight:
    """The weight `name` of `module` as products take it."""
    values, scale = getattr(module, name)[...], getattr(module, name + SUFFIX, None)
    return values if scale is None else Quantized(values, scale[...])


def _rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The terms of a product with one feature, `weight [1, D]`: operands rounded as in any other."""
    return x.astype(weight.dtype).astype(jnp.float32) * weight.astype(jnp.float32)


def _sigmoid(value: jax.Array) -> jax.Array:
    """Of `value [N, 1]`, in the company of copies, as even a flat row of N may be short."""
    return flatly(jax.nn.sigmoid, jnp.broadcast_to(value, (len(value), _FLAT)))[:, :1]
