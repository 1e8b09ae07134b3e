"""The encoder: its weights and its forward pass (BERT, Devlin et al. 2019; RoBERTa, Liu et al. 2019).

It is merged and called as a `Decoder` is (`graphs.model.decoder`). What differs: learned positions and token types, a
norm after each sublayer instead of before it, and no output head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import EncoderForm, ModelConfig
from xla_engine.graphs.linear.products import kept_dtype, looked_up
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.parameters import LeafMaker, Param
from xla_engine.graphs.model.sublayers import Linear
from xla_engine.graphs.ops.encoder_rows import activated, added_norm, layer_norm

Native = tuple[str, jax.Array] | None


class LayerNorm(nnx.Module):
    """LayerNorm with weight and bias (Ba et al. 2016)."""

    def __init__(self, make: LeafMaker, size: int, eps: float) -> None:
        self.eps = eps
        self.weight, self.bias = make.vector(size), make.vector(size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The norm of `x [N, D]`, float32."""
        return layer_norm(x, self.weight[...], self.bias[...], self.eps)

    def of_sum(self, x: jax.Array, bias: Param, residual: jax.Array, native: Native) -> jax.Array:
        """The norm of `residual + (x + bias)`. native: as in `added_norm`."""
        return added_norm(x, bias[...], residual, self.weight[...], self.bias[...], self.eps, native)


class EncoderLayer(nnx.Module):
    """One layer: attention and an MLP, each followed by its sum with the input and a norm."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        assert c.encoder is not None
        d, f, eps = c.hidden_size, c.intermediate_size, c.rms_norm_eps
        self.index, self.activation = index, c.encoder.activation
        self.qkv = Linear(make, (c.qkv_features, d), None, bias=True)
        self.output, self.output_bias = Linear(make, (d, d), None), make.vector(d)
        self.attention_norm = LayerNorm(make, d, eps)
        self.up, self.up_bias = Linear(make, (f, d), None), make.vector(f)
        self.down, self.down_bias = Linear(make, (d, f), None), make.vector(d)
        self.mlp_norm = LayerNorm(make, d, eps)

    def __call__(self, x: jax.Array, call: Call) -> jax.Array:
        """The residual stream `[N, D]`, float32, after this layer."""
        products = call.products
        native = None if products.isa is None or products.live is None else (products.isa, products.live)
        mixed = call.attend(self.index, self.qkv(products, x), AttentionWeights())
        x = self.attention_norm.of_sum(self.output(products, mixed), self.output_bias, x, native)
        dtype = kept_dtype(self.up.values)
        hidden = activated(self.up(products, x), self.up_bias[...], self.activation, dtype, native)
        return self.mlp_norm.of_sum(self.down(products, hidden), self.down_bias, x, native)


class Encoder(nnx.Module):
    """An encoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(self, make: LeafMaker) -> None:
        c = self.config = make.sharding.config
        assert c.encoder is not None
        self.form: EncoderForm = c.encoder
        d = c.hidden_size
        self.embed = make.unquantized.matrix((c.vocab_size, d))
        self.positions = make.unquantized.matrix((self.form.positions, d))
        self.token_types = make.unquantized.matrix((self.form.token_types, d))
        self.embed_norm = LayerNorm(make, d, c.rms_norm_eps)
        self.layers = nnx.List([EncoderLayer(make, c, index) for index in range(c.num_hidden_layers)])

    def __call__(self, tokens: jax.Array, positions: jax.Array, types: jax.Array, call: Call) -> jax.Array:
        """The output of the last layer for `tokens [N]`: float32 `[N, D]`.

        positions: of the tokens in their texts, from 0. types: of the tokens.
        """
        rows = jnp.minimum(positions + self.form.position_offset, self.form.positions - 1)
        x = looked_up(self.embed[...], tokens)
        x = x + looked_up(self.token_types[...], types) + looked_up(self.positions[...], rows)
        x = self.embed_norm(x)
        for layer in self.layers:
            x = layer(x, call)
        return x
