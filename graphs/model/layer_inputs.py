"""Embeddings of each token for each layer (Gemma 3n and 4): where they come from, and what a layer does with them."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import Products, looked_up
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.parameters import LeafMaker
from xla_engine.graphs.model.sublayers import Linear, alone
from xla_engine.graphs.ops.norms import rms_norm


class LayerEnd(nnx.Module):
    """What follows the MLP in Gemma 4: a gate of the residual stream multiplies the token's embedding for the layer,
    if there is any, and is added; then the stream is multiplied by a number."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        self.config, self.index = c, index
        d, size = c.hidden_size, c.hidden_size_per_layer_input
        self.gate = Linear(make, (size, d), None) if size else None
        self.output = Linear(make, (d, size), None) if size else None
        self.norm = make.vector(d) if size else None
        self.scalar = make.vector(1) if c.layer_scalar else None

    def __call__(self, products: Products, x: jax.Array, call: Call) -> jax.Array:
        """The residual stream `[N, D]` after the layer."""
        assert self.scalar is not None
        if self.gate is not None:
            x = x + self.added(products, x, call)
        # Rounded separately: a product that is added to would be fused with it in some programs.
        return lax.optimization_barrier(lax.optimization_barrier(x) * self.scalar[...])

    def added(self, products: Products, x: jax.Array, call: Call) -> jax.Array:
        """What the token's embedding for the layer adds to the residual stream `x [N, D]`."""
        assert self.gate is not None and self.output is not None and self.norm is not None
        assert call.inputs is not None
        gate, dtype = self.gate(products, x), jnp.dtype(jnp.float32)
        gate = alone(products, gate, None, self.config.hidden_act, dtype)
        hidden = lax.optimization_barrier(gate * call.inputs[:, self.index])
        return rms_norm(self.output(products, hidden), self.norm[...], self.config.rms_norm_eps)


class LayerInputs(nnx.Module):
    """Embeddings of each token for each layer: a row of a table, and a product with its embedding (Gemma 3n)."""

    def __init__(self, make: LeafMaker, c: ModelConfig, dtype: jnp.dtype) -> None:
        self.config, self.dtype = c, dtype
        size, total = c.hidden_size_per_layer_input, c.num_hidden_layers * c.hidden_size_per_layer_input
        # The table has a vocabulary of its own, which devices share as they share the other one.
        own = replace(make.sharding, config=replace(c, vocab_size=c.vocab_size_per_layer_input))
        shape = (c.vocab_size_per_layer_input, total)
        self.sharding, self.table = own, Linear(make, shape, own.cut("vocabulary"), role="plain")
        self.projection = Linear(make, (total, c.hidden_size), None)
        self.norm = make.vector(size)

    def __call__(self, tokens: jax.Array, x: jax.Array, products: Products) -> jax.Array:
        """The embeddings of `tokens [N]`, whose own are `x [N, D]`: float32 `[N, layers, P]`."""
        c, size = self.config, self.config.hidden_size_per_layer_input
        if c.vocab_size_per_layer_input < c.vocab_size:  # tokens behind the table have its first row
            tokens = jnp.where(tokens < c.vocab_size_per_layer_input, tokens, 0)
        lookup = products.embedded if self.table.form is not None else looked_up
        found = lookup(self.table.values, tokens, self.sharding)
        found = lax.optimization_barrier(found * jnp.asarray(math.sqrt(size), self.dtype).astype(jnp.float32))
        made = lax.optimization_barrier(
            self.projection(products, x) * np.float32(1 / math.sqrt(c.hidden_size))
        )
        made = rms_norm(made.reshape(len(x), -1, size), self.norm[...], c.rms_norm_eps)
        made = lax.optimization_barrier(made)
        return lax.optimization_barrier((made + found.reshape(made.shape)) * np.float32(math.sqrt(0.5)))
