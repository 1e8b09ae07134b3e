"""A layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next) as a draft head.

Its input is the model's output after the final norm. It shares the model's embedding and output head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.model.decoder import Decoder, ModelSpec
from xla_engine.graphs.model.sublayers import Call
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.sampling.logits import Logits
from xla_engine.graphs.steps.draft_head import HeadForm


class MtpWeights(NamedTuple):
    """Weights of the layer.

    join: `[D, 2 D]`, applied to the concatenation of token embedding and hidden state; packed as products read it.
    token_norm, hidden_norm: `[D]`. decoder: the leaves of a decoder of one layer with the model's embedding and head.
    """

    join: jax.Array
    token_norm: jax.Array
    hidden_norm: jax.Array
    decoder: list[jax.Array]


def mtp_form(layer: ModelSpec) -> HeadForm:
    """The form of an MTP head. layer: the spec of a model of the one layer."""

    def bind(own: MtpWeights, spec: ModelSpec, model: Decoder) -> _MtpHead:
        return _MtpHead(layer.merge(own.decoder), own, model)

    return HeadForm(layer, bind)


@dataclass(frozen=True, slots=True)
class _MtpHead:
    layer: Decoder
    weights: MtpWeights
    model: Decoder

    def made(self, seen: jax.Array, used: jax.Array) -> jax.Array:
        del used
        return self.model.normed(seen)

    def over(self, before: jax.Array, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        eps = self.layer.config.rms_norm_eps
        token = rms_norm(self.layer.embedded(tokens, call.products), self.weights.token_norm, eps)
        before = rms_norm(before, self.weights.hidden_norm, eps)
        x = call.products.linear(self.weights.join, jnp.concatenate([token, before], axis=1))
        return self.layer.through(x, call)

    def onward(self, x: jax.Array) -> jax.Array:
        return self.layer.normed(x)

    def logits(self, x: jax.Array, products: Products) -> Logits:
        return self.layer.logits(x, products)
