"""A layer of a decoder: norms, a token mixer, an MLP."""

from __future__ import annotations

import jax
from flax import nnx

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import Input, Norm, Products, normed
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.layer_inputs import LayerEnd
from xla_engine.graphs.model.parameters import LeafMaker
from xla_engine.graphs.model.sublayers import (
    Linear,
    MlpWithExperts,
    mixers_of,
    mlp_of,
    value,
)
from xla_engine.graphs.ops.norms import centred


class StreamNorm(nnx.Module):
    """A norm of the residual stream."""

    def __init__(self, make: LeafMaker, c: ModelConfig, factor: float = 1.0) -> None:
        self.config, self.weight, self.factor = c, make.vector(c.hidden_size), factor
        self.bias = make.vector(c.hidden_size) if c.norm_bias else None

    def __call__(self) -> Norm:
        return Norm(self.weight[...] * self.factor, self.config.rms_norm_eps, value(self.bias))


class Layer(nnx.Module):
    """One transformer layer. There may be norms before and after the token mixer, and before and after the MLP."""

    def __init__(self, make: LeafMaker, index: int) -> None:
        make = make.of_layer(index)
        self.sharding, self.config = make.sharding, (c := make.sharding.config)
        self.is_last = index + 1 == c.num_hidden_layers
        self.mixer, self.beside = mixers_of(make, c, index)
        self.mlp = mlp_of(make, c, index)
        self.input_norm = StreamNorm(make, c) if c.pre_norm and self.mixer is not None else None
        self.post_attention_norm = StreamNorm(make, c) if c.post_norm else None
        second = c.pre_norm and not c.use_parallel_residual and self.mlp is not None
        self.pre_feedforward_norm = StreamNorm(make, c, c.mlp_multipliers[0]) if second else None
        self.post_feedforward_norm = StreamNorm(make, c) if c.post_norm and not c.experts_of(index) else None
        self.end = LayerEnd(make, c, index) if c.layer_scalar else None

    def __call__(self, x: jax.Array, call: Call) -> jax.Array:
        """The residual stream `[N, D]`, float32, after this layer; after the last, only for rows in `call.read`."""
        # After the mixer of the last layer, only rows that are read need to be computed.
        products = call.products
        if self.is_last and call.read is not None:
            products = products.for_rows(call.read)
        residual, norm = x, None if self.input_norm is None else self.input_norm()
        for mixer in (self.mixer, self.beside):
            if mixer is not None:
                mixed = mixer(self._centred(x), norm, call)
                residual = self._added(residual, mixer.output, mixed, self.post_attention_norm, products)
        if self.mlp is None:
            return residual
        source = self._centred(x if self.config.use_parallel_residual else residual)
        if not self.config.use_parallel_residual:
            norm = None if self.pre_feedforward_norm is None else self.pre_feedforward_norm()
        if isinstance(self.mlp, MlpWithExperts):
            x = self.mlp(products, source, norm, residual)
        else:
            hidden = self.mlp(products, source, norm, self.config.hidden_act)
            x = self._added(residual, self.mlp.down, hidden, self.post_feedforward_norm, products)
        return x if self.end is None else self.end(products, x, call)

    def _centred(self, x: jax.Array) -> jax.Array:
        return centred(x) if self.config.layer_norm else x

    def _added(
        self, residual: jax.Array, linear: Linear, x: Input, post: StreamNorm | None, products: Products
    ) -> jax.Array:
        """`residual` plus the product with x, normalised and scaled if the model does so."""
        factor = linear.factor * self.config.residual_multiplier
        if post is None and factor == 1:
            own = self.sharding.own(residual, "residual")
            return self.sharding.gather(linear(products, x, residual=own), "residual")
        out = self.sharding.gather(linear(products, x), "residual")
        return residual + factor * normed(out, None if post is None else post())
