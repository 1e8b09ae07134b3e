"""An EAGLE-3 head (Li et al., arXiv 2503.01840, section 3) as a draft head; drafts are chains, not trees.

One product projects the model's residual stream before a low, a middle and a high layer to the head's hidden size. The
queries, keys and values of its one layer are computed from the concatenation of the token's embedding and this hidden
state, each normalised on its own. Further drafts use the layer's output before the final norm as hidden state. The
output head covers only the frequent token ids of the model. Tensor names and structure follow vLLM's `llama_eagle3.py`
and SafeAILab/EAGLE's `cnets.py`.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import ROWS_LEFT, Norm, Products, looked_up
from xla_engine.graphs.model.decoder import Decoder, ModelSpec
from xla_engine.graphs.model.sublayers import Call
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.steps.draft_head import HeadForm


class Eagle3Weights(NamedTuple):
    """Vectors are float32; matrices are packed as the products read them.

    fuse: `[D, taps * D of the model]`. token_norm, hidden_norm, mlp_norm, final_norm: `[D]`.
    qkv: `[(H + 2 KV) Dh, 2 D]`. output: `[D, H Dh]`. gate_up: `[2 F, D]`. down: `[D, F]`. head: `[V', D]`.
    ids: i32 `[V']`, the model's token id for each of the head's, all distinct; None: the ids are the same.
    embed: `[V, D]`, as in the checkpoint; None: the model's.
    """

    fuse: jax.Array
    token_norm: jax.Array
    hidden_norm: jax.Array
    qkv: jax.Array
    output: jax.Array
    mlp_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    final_norm: jax.Array
    head: jax.Array
    ids: jax.Array | None
    embed: jax.Array | None


def eagle3_form(layer: ModelSpec, taps: tuple[int, ...], *, norm_before_residual: bool) -> HeadForm:
    """The form of an EAGLE-3 head.

    layer: the spec of a model of the one layer. norm_before_residual: the residual stream starts with the normalised
    hidden state instead of the hidden state itself.
    """
    bind = functools.partial(_Eagle3Head, layer, norm_before_residual)
    return HeadForm(layer, bind, taps)


@dataclass(frozen=True, slots=True)
class _Eagle3Head:
    layer: ModelSpec
    norm_before_residual: bool
    weights: Eagle3Weights
    spec: ModelSpec
    model: Decoder

    @property
    def config(self) -> ModelConfig:
        return self.layer.config

    def made(self, seen: jax.Array, used: jax.Array) -> jax.Array:
        products = self.layer.products or ROWS_LEFT
        return products.for_rows(used).linear(self.weights.fuse, seen)

    def over(self, before: jax.Array, tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        weights, config, products = self.weights, self.config, call.products
        token = rms_norm(self.embedded(tokens), weights.token_norm, config.rms_norm_eps)
        normed = rms_norm(before, weights.hidden_norm, config.rms_norm_eps)
        residual = normed if self.norm_before_residual else before
        qkv = products.linear(weights.qkv, jnp.concatenate([token, normed], axis=1))
        x = products.linear(weights.output, call.attend(0, qkv, AttentionWeights()), residual=residual)
        norm = Norm(weights.mlp_norm, config.rms_norm_eps)
        inner = products.gated(weights.gate_up, x, norm=norm, activation=config.hidden_act)
        yield products.linear(weights.down, inner, residual=x)

    def onward(self, x: jax.Array) -> jax.Array:
        return x

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """float32 `[N, D]` of `tokens [N]`."""
        if self.weights.embed is not None:
            return looked_up(self.weights.embed, tokens)
        return self.model.embedded(tokens, self.spec.products or ROWS_LEFT)

    def logits(self, x: jax.Array, products: Products) -> Logits:
        norm = Norm(self.weights.final_norm, self.config.rms_norm_eps)
        known, ids = products.head(self.weights.head, norm, x), self.weights.ids  # logits of V' tokens
        if ids is None:
            return known
        by_row = isinstance(known, ByRow)
        some = known.values if isinstance(known, ByRow) else known
        count, size = len(x), self.spec.config.vocab_size
        every = jnp.full((count, size) if by_row else (size, count), -jnp.inf, some.dtype)
        at = every.at[:, ids] if by_row else every.at[ids]
        whole = at.set(some, unique_indices=True, mode="promise_in_bounds")
        return ByRow(whole) if by_row else whole
