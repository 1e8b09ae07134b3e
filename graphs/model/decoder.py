"""The decoder: its weights and its forward pass, independent of caches, batches and requests.

flax.nnx describes the parameters. `graphs.model.spec` imports this module when a graph is traced, or when nothing on
disk tells the names and shapes of the leaves, so a module that imports flax has no constants (`runner.program_key`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import Input, Norm, Products, looked_up, normed
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.parameters import LeafMaker
from xla_engine.graphs.model.sublayers import (
    LayerEnd,
    LayerInputs,
    Linear,
    MlpWithExperts,
    finished_logits,
    mixer_of,
    mlp_of,
    value,
)
from xla_engine.graphs.ops.norms import centred
from xla_engine.graphs.sampling.logits import Logits


class StreamNorm(nnx.Module):
    """A norm of the residual stream."""

    def __init__(self, make: LeafMaker, c: ModelConfig) -> None:
        self.config, self.weight = c, make.vector(c.hidden_size)
        self.bias = make.vector(c.hidden_size) if c.norm_bias else None

    def __call__(self) -> Norm:
        return Norm(self.weight[...], self.config.rms_norm_eps, value(self.bias))


class Layer(nnx.Module):
    """One transformer layer. There may be norms before and after the token mixer, and before and after the MLP."""

    def __init__(self, make: LeafMaker, index: int) -> None:
        make = make.of_layer(index)
        self.sharding, self.config = make.sharding, (c := make.sharding.config)
        self.is_last = index + 1 == c.num_hidden_layers
        self.input_norm = StreamNorm(make, c) if c.pre_norm else None
        self.mixer = mixer_of(make, c, index)
        self.post_attention_norm = StreamNorm(make, c) if c.post_norm else None
        second = c.pre_norm and not c.use_parallel_residual
        self.pre_feedforward_norm = StreamNorm(make, c) if second else None
        self.mlp = mlp_of(make, c, index)
        self.post_feedforward_norm = StreamNorm(make, c) if c.post_norm and not c.experts_of(index) else None
        self.end = LayerEnd(make, c, index) if c.layer_scalar else None

    def __call__(self, x: jax.Array, call: Call) -> jax.Array:
        """The residual stream `[N, D]`, float32, after this layer; after the last, only for rows in `call.read`."""
        # After the mixer of the last layer, only rows that are read need to be computed.
        products = call.products
        if self.is_last and call.read is not None:
            products = products.for_rows(call.read)
        norm = None if self.input_norm is None else self.input_norm()
        mixed = self.mixer(self._centred(x), norm, call)
        residual = self._added(x, self.mixer.output, mixed, self.post_attention_norm, products)
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
        if post is None and self.config.residual_multiplier == 1:
            own = self.sharding.own(residual, "residual")
            return self.sharding.gather(linear(products, x, residual=own), "residual")
        out = self.sharding.gather(linear(products, x), "residual")
        return residual + self.config.residual_multiplier * normed(out, None if post is None else post())


class Decoder(nnx.Module):
    """A decoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(self, make: LeafMaker, dtype: jnp.dtype) -> None:
        """dtype: of the model's weights, unless they are quantised."""
        self.sharding, self.dtype = make.sharding, dtype
        c = self.config = make.sharding.config
        shape, cut = (c.vocab_size, c.hidden_size), self.sharding.cut("vocabulary")
        tied = c.tie_word_embeddings
        self.embed = Linear(make, shape, cut, role="head" if tied else "plain")
        self.layers = nnx.List([Layer(make, index) for index in range(c.num_hidden_layers)])
        self.layer_inputs = LayerInputs(make, c, dtype) if c.hidden_size_per_layer_input else None
        self.final_norm = StreamNorm(make, c)
        self.head = None if tied else Linear(make, shape, cut, role="head")
        self.head_bias = make.vector(c.vocab_size) if c.head_bias else None

    def hidden(self, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        """The residual stream of `tokens [N]` before each layer and after the last: float32 `[N, D]`."""
        x = self.embedded(tokens, call.products)
        if self.layer_inputs is not None:
            call = replace(call, inputs=self.layer_inputs(tokens, x, call.products))
        return self.through(x, call)

    def embedded(self, tokens: jax.Array, products: Products) -> jax.Array:
        """The residual stream of `tokens [N]` before the first layer: float32 `[N, D]`."""
        lookup = products.embedded if self.head is None or self.embed.form is not None else looked_up
        x = lookup(self.embed.values, tokens, self.sharding)
        if self.config.embedding_multiplier != 1:  # Gemma's is rounded to the weights' dtype
            multiplier = jnp.asarray(self.config.embedding_multiplier, self.dtype).astype(jnp.float32)
            x = lax.optimization_barrier(x * multiplier)  # rounded separately, like the scales in `looked_up`
        return x

    def through(
        self, x: jax.Array, call: Call, added: Sequence[tuple[jax.Array, jax.Array]] = ()
    ) -> Iterator[jax.Array]:
        """The residual stream `x [N, D]` before each layer and after the last.

        added: for each of the first layers, the rows bool `[N, 1]` to which `[N, D]` is added after it.
        """
        yield x
        for index, layer in enumerate(self.layers):
            x = layer(x, call)
            if index < len(added):
                rows, more = added[index]
                x = jnp.where(rows, x + more, x)
            yield x

    def normed(self, x: jax.Array) -> jax.Array:
        """`x [N, D]` after the final norm."""
        return normed(centred(x) if self.config.layer_norm else x, self.final_norm())

    def logits(self, x: jax.Array, products: Products) -> Logits:
        """Logits of the residual stream `[N, D]`, float32."""
        head = self.embed if self.head is None else self.head
        x = centred(x) if self.config.layer_norm else x
        found = products.head(head.values, self.final_norm(), x, self.sharding)
        return finished_logits(self.config, found, value(self.head_bias))
