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

from xla_engine.graphs.linear.products import Products, looked_up, normed
from xla_engine.graphs.model.alternating import AlternatingLayer, Streams
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.layer import Layer, StreamNorm
from xla_engine.graphs.model.layer_inputs import LayerInputs
from xla_engine.graphs.model.parameters import LeafMaker
from xla_engine.graphs.model.sublayers import (
    Linear,
    finished_logits,
    value,
)
from xla_engine.graphs.ops.norms import centred
from xla_engine.graphs.sampling.logits import Logits


class Decoder(nnx.Module):
    """A decoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(self, make: LeafMaker, dtype: jnp.dtype) -> None:
        """dtype: of the model's weights, unless they are quantised."""
        self.sharding, self.dtype = make.sharding, dtype
        c = self.config = make.sharding.config
        shape, cut = (c.vocab_size, c.hidden_size), self.sharding.cut("vocabulary")
        tied = c.tie_word_embeddings
        self.embed = Linear(make, shape, cut, role="head" if tied else "plain")
        form = c.alternating
        self.streams = None if form is None else Streams(make, c, form)
        self.layers = nnx.List(
            [
                Layer(make, index) if form is None else AlternatingLayer(make, index, form)
                for index in range(c.num_hidden_layers)
            ]
        )
        self.layer_inputs = LayerInputs(make, c, dtype) if c.hidden_size_per_layer_input else None
        self.final_norm = StreamNorm(make, c)
        self.head = None if tied else Linear(make, shape, cut, role="head")
        self.head_bias = make.vector(c.vocab_size) if c.head_bias else None

    def hidden(self, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        """The residual stream of `tokens [N]` before each layer and after the last: float32 `[N, D]`.

        Of a model with several streams, `[S, N, D]` before each layer, and what the head reads of them, `[N, D]`.
        """
        x = self.embedded(tokens, call.products)
        return self.through(x, self.with_inputs(call, tokens, x))

    def with_inputs(self, call: Call, tokens: jax.Array, x: jax.Array) -> Call:
        """The call with embeddings of `tokens [N]` for each layer, if the model has some. x: what the layers begin
        with, `[N, D]`."""
        if self.layer_inputs is None:
            return call
        return replace(call, inputs=self.layer_inputs(tokens, x, call.products))

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
        x = x if self.streams is None else self.streams.several(x, call.products)
        yield x
        for index, layer in enumerate(self.layers):
            x = layer(x, call)
            if index < len(added):
                rows, more = added[index]
                x = jnp.where(rows, x + more, x)
            if layer.is_last and self.streams is not None:
                read = call.products if call.read is None else call.products.for_rows(call.read)
                x = self.streams.one(x, read)
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
