"""The encoder: its weights and its forward pass (BERT, Devlin et al. 2019; ModernBERT, Warner et al. 2024).

It is merged and called as a `Decoder` is (`graphs.model.decoder`). What differs: a norm behind the embeddings, norms
after each sublayer's sum if the model does not have them before the sublayer, perhaps learned positions and token
types, and no output head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.encoder_form import EncoderForm
from xla_engine.graphs.linear.products import Norm, Products, kept_dtype, looked_up
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.parameters import LeafMaker, Param
from xla_engine.graphs.model.sublayers import Linear, value
from xla_engine.graphs.ops.encoder_rows import activated, added_norm, layer_norm
from xla_engine.graphs.ops.norms import centred

Native = tuple[str, jax.Array] | None


class LayerNorm(nnx.Module):
    """LayerNorm with a weight and perhaps a bias (Ba et al. 2016)."""

    def __init__(self, make: LeafMaker, c: ModelConfig) -> None:
        assert c.encoder is not None
        self.eps, self.weight = c.rms_norm_eps, make.vector(c.hidden_size)
        self.bias = make.vector(c.hidden_size) if c.encoder.norm_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """The norm of `x [N, D]`, float32."""
        return layer_norm(x, self.weight[...], _or_zeros(self.bias, x.shape[1]), self.eps)

    def before(self) -> Norm:
        """The norm as a product takes it, of rows from which `centred` took their mean."""
        return Norm(self.weight[...], self.eps, value(self.bias))

    def of_sum(self, x: jax.Array, bias: Param | None, residual: jax.Array, native: Native) -> jax.Array:
        """The norm of `residual + (x + bias)`. native: as in `added_norm`."""
        added, shift = (_or_zeros(each, x.shape[1]) for each in (bias, self.bias))
        return added_norm(x, added, residual, self.weight[...], shift, self.eps, native)


class EncoderLayer(nnx.Module):
    """One layer: attention and an MLP, each added to its input, with norms before both or after both sums.

    The rows of `up` are those of the gate, if there is one, then those of what it multiplies.
    """

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        assert c.encoder is not None
        d, f, form = c.hidden_size, c.intermediate_size, c.encoder
        width = 2 * f if form.gated else f
        self.index, self.form = index, form
        self.qkv = Linear(make, (c.qkv_features, d), None, bias=c.qkv_bias)
        self.output, self.output_bias = Linear(make, (d, d), None), make.vector(d) if c.output_bias else None
        self.attention_norm = None if form.pre_norm and index == 0 else LayerNorm(make, c)
        self.up, self.up_bias = Linear(make, (width, d), None), make.vector(width) if form.up_bias else None
        self.down, self.down_bias = Linear(make, (d, f), None), make.vector(d) if c.mlp_bias else None
        self.mlp_norm = LayerNorm(make, c)

    def __call__(self, x: jax.Array, call: Call) -> jax.Array:
        """The residual stream `[N, D]`, float32, after this layer."""
        products = call.products
        native = None if products.isa is None or products.live is None else (products.isa, products.live)
        if self.form.pre_norm:
            x = self._added(x, self.output, self._mixed(x, self.attention_norm, call), self.output_bias, call)
            return self._added(
                x, self.down, self._hidden(x, self.mlp_norm, call, native), self.down_bias, call
            )
        assert self.attention_norm is not None
        mixed = self._mixed(x, None, call)
        x = self.attention_norm.of_sum(self.output(products, mixed), self.output_bias, x, native)
        hidden = self._hidden(x, None, call, native)
        return self.mlp_norm.of_sum(self.down(products, hidden), self.down_bias, x, native)

    def _mixed(self, x: jax.Array, norm: LayerNorm | None, call: Call) -> jax.Array:
        """The output of all heads, `[N, D]`."""
        return call.attend(self.index, _product(self.qkv, x, norm, call.products), AttentionWeights())

    def _hidden(self, x: jax.Array, norm: LayerNorm | None, call: Call, native: Native) -> jax.Array:
        """The hidden features of the MLP, `[N, F]`, in the dtype of its weights."""
        form, dtype = self.form, kept_dtype(self.up.values)
        before = _product(self.up, x, norm, call.products)
        bias = _or_zeros(self.up_bias, before.shape[1])
        return activated(before, bias, form.activation, dtype, native, gated=form.gated)

    @staticmethod
    def _added(
        residual: jax.Array, linear: Linear, x: jax.Array, bias: Param | None, call: Call
    ) -> jax.Array:
        """`residual` plus the product with x and its bias."""
        out = linear(call.products, x, residual=residual)
        return out if bias is None else out + bias[...]


class Encoder(nnx.Module):
    """An encoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(self, make: LeafMaker) -> None:
        c = self.config = make.sharding.config
        assert c.encoder is not None
        self.form: EncoderForm = c.encoder
        d, plain = c.hidden_size, make.unquantized
        self.embed = plain.matrix((c.vocab_size, d))
        self.positions = plain.matrix((self.form.positions, d)) if self.form.positions else None
        self.token_types = plain.matrix((self.form.token_types, d)) if self.form.token_types else None
        buckets = self.form.relative_buckets
        self.relative_bias = plain.matrix((buckets, c.num_attention_heads)) if buckets else None
        self.embed_norm = LayerNorm(make, c)
        self.layers = nnx.List([EncoderLayer(make, c, index) for index in range(c.num_hidden_layers)])
        self.final_norm = LayerNorm(make, c) if self.form.pre_norm else None

    def __call__(self, tokens: jax.Array, positions: jax.Array, types: jax.Array, call: Call) -> jax.Array:
        """The output of the last layer for `tokens [N]`: float32 `[N, D]`.

        positions: of the tokens in their texts, from 0. types: of the tokens.
        """
        x = looked_up(self.embed[...], tokens)
        if self.token_types is not None:
            x = x + looked_up(self.token_types[...], types)
        if self.positions is not None:
            rows = jnp.minimum(positions + self.form.position_offset, self.form.positions - 1)
            x = x + looked_up(self.positions[...], rows)
        x = self.embed_norm(x)
        for layer in self.layers:
            x = layer(x, call)
        return x if self.final_norm is None else self.final_norm(x)

    def distances(self, span: int) -> jax.Array | None:
        """What the distance of a key adds to its score in each head, as `AttentionWeights` has it: `[H, 2 span]`."""
        if self.relative_bias is None:
            return None
        return self.relative_bias[...].astype(jnp.float32)[distance_buckets(span)].T


# From which distances on the buckets begin that share several, 8 times powers of the square root of 2, rounded up.
_BUCKETS_BEGIN = (8, 12, 16, 23, 32, 46, 64, 91)


def distance_buckets(span: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The bucket of each distance from `-span` to `span - 1` (T5, Raffel et al. 2020, section 2.1; of MPNet's 32).

    The first half is for a query's own key and those before it. Of each half, the first eight are for distances of
    their own, and the rest for distances whose logarithms are equally far apart; the last has no end.
    """
    distance = np.arange(-span, span)
    size, exact, half = np.abs(distance), _BUCKETS_BEGIN[0], 2 * len(_BUCKETS_BEGIN)
    found = np.where(size < exact, size, exact - 1 + np.searchsorted(_BUCKETS_BEGIN, size, side="right"))
    return (found + half * (distance > 0)).astype(np.int32)


def _product(linear: Linear, x: jax.Array, norm: LayerNorm | None, products: Products) -> jax.Array:
    """The product with `x [N, D]`, normalised before if there is a norm."""
    if norm is None:
        return linear(products, x)
    return linear(products, centred(x), norm=norm.before())


def _or_zeros(bias: Param | None, size: int) -> jax.Array:
    return jnp.zeros(size, jnp.float32) if bias is None else bias[...]
