"""Layers with several residual streams (Gemma 3n).

Alternating updates (AltUp, Baykal et al. 2023, arXiv 2301.13310): of S streams of a token, a layer computes the first.
The others follow from it by coefficients that a router makes of the first. A low-rank product stands beside attention
(LAuReL, Menghani et al. 2024, arXiv 2411.07501), and the first layers' MLPs cut off most gates by their mean and
standard deviation. Nothing here imports transformers; the computation is that of its `modeling_gemma3n.py`.

Sums of a row have one order (`graphs.ops.fixed_order_sums`), and what is added to something is rounded before it.
"""

from __future__ import annotations

import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from xla_engine.graphs.alternating_form import AlternatingForm
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import Activation, Norm, Products, activate, kept_dtype, normed
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.layer import StreamNorm
from xla_engine.graphs.model.layer_inputs import LayerEnd
from xla_engine.graphs.model.parameters import LeafMaker
from xla_engine.graphs.model.sublayers import Linear, Mlp, mixers_of
from xla_engine.graphs.ops.encoder_rows import activated
from xla_engine.graphs.ops.fixed_order_sums import sum_first, sum_last
from xla_engine.graphs.ops.norms import centred, flatly, rms_norm


class Streams(nnx.Module):
    """From the embedding to the S streams of a token, and from these to one."""

    def __init__(self, make: LeafMaker, c: ModelConfig, form: AlternatingForm) -> None:
        d, others = c.hidden_size, form.streams - 1
        self.others, self.spread = others, Linear(make, (others * d, d), None)
        self.joined = nnx.List([Linear(make, (d, d), None) for _ in range(others)])

    def several(self, x: jax.Array, products: Products) -> jax.Array:
        """The streams `[S, N, D]` of embeddings `x [N, D]`, all of the same magnitude."""
        made = self.spread(products, x).reshape(len(x), self.others, -1)
        return jnp.stack([x, *(_as_large(made[:, at], x) for at in range(self.others))])

    def one(self, x: jax.Array, products: Products) -> jax.Array:
        """The mean `[N, D]` of the streams `x [S, N, D]`, the others projected and as large as the first."""
        made = [_as_large(each(products, x[at]), x[0]) for at, each in enumerate(self.joined, 1)]
        return sum_first(jnp.stack([x[0], *made])) * np.float32(1 / (self.others + 1))


class Updates(nnx.Module):
    """What a layer's output does to all streams. `scale [D]` is of the first stream, for the layer's end."""

    def __init__(self, make: LeafMaker, c: ModelConfig, form: AlternatingForm) -> None:
        d, count = c.hidden_size, form.streams
        self.count, self.eps, plain = count, c.rms_norm_eps, make.unquantized
        self.router, self.router_norm = Linear(plain, (count, d), None), make.vector(d)
        self.prediction = plain.matrix((count * count, count))
        self.correction = plain.matrix((count, count))
        self.scale = make.vector(d)

    def predicted(self, x: jax.Array, products: Products) -> jax.Array:
        """The streams `x [S, N, D]` as they are expected after the layer; the first is the layer's input."""
        factors = self._factors(x[0], self.prediction[...], products).reshape(-1, self.count, self.count)
        terms = x[:, None] * factors.transpose(2, 1, 0)[..., None]  # [S of a sum, S, N, D]
        return x + sum_first(lax.optimization_barrier(terms))

    def corrected(self, predicted: jax.Array, made: jax.Array, products: Products) -> jax.Array:
        """The streams `[S, N, D]`, of which the layer made the first `[N, D]` another than `predicted`."""
        factors = self._factors(made, self.correction[...], products).T[..., None] + 1  # [S, N, 1]
        return predicted + lax.optimization_barrier((made - predicted[0]) * factors)

    def scaled(self, x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x * self.scale[...])

    def _factors(self, x: jax.Array, weight: jax.Array, products: Products) -> jax.Array:
        """`weight [F, S]` times what the router says of `x [N, D]`: `[N, F]`."""
        norm = Norm(self.router_norm[...] * np.float32(1 / x.shape[1]), self.eps)
        routed = self.router(products, x, norm=norm)  # [N, S]
        # On 16 copies: XLA:CPU's exponential of a short row has other bits.
        wide = jnp.broadcast_to(routed[..., None], (*routed.shape, 16))
        routed = flatly(jnp.tanh, wide)[..., 0]
        terms = lax.optimization_barrier(routed[:, None] * weight.astype(jnp.float32))  # [N, F, S]
        return lax.optimization_barrier(sum_last(terms)[..., 0])


class Laurel(nnx.Module):
    """A low-rank product beside attention, of the same normalised input."""

    def __init__(self, make: LeafMaker, c: ModelConfig, form: AlternatingForm) -> None:
        d, rank, self.eps = c.hidden_size, form.laurel_rank, c.rms_norm_eps
        self.left, self.right = Linear(make, (rank, d), None), Linear(make, (d, rank), None)
        self.norm = make.vector(d)

    def __call__(self, products: Products, x: jax.Array, norm: Norm, attended: jax.Array) -> jax.Array:
        """`attended [N, D]` and the product with the normalised `x [N, D]`, both with their inputs, to one."""
        low = self.right(products, self.left(products, x, norm=norm))
        own = lax.optimization_barrier((normed(x, norm), rms_norm(low, self.norm[...], self.eps)))
        return lax.optimization_barrier((attended + (own[0] + own[1])) * np.float32(math.sqrt(0.5)))


class CutMlp(nnx.Module):
    """As `Mlp`, but of its gates only that part counts which exceeds their mean by `cutoff` standard deviations."""

    def __init__(self, make: LeafMaker, c: ModelConfig, cutoff: float) -> None:
        d, inner, self.cutoff = c.hidden_size, c.intermediate_size, np.float32(cutoff)
        self.sharding = make.sharding
        pairs, residual = self.sharding.cut("mlp", paired=True), self.sharding.cut("residual")
        self.gate_up = Linear(make, (2 * inner, d), pairs, target="gate_up")
        self.down = Linear(make, (d, inner), residual, target="down")

    def __call__(
        self, products: Products, x: jax.Array, norm: Norm | None = None, activation: Activation = "silu"
    ) -> jax.Array:
        """See `Mlp`."""
        both, dtype = self.gate_up(products, x, norm=norm), kept_dtype(self.gate_up.values)
        gate, up = (self.sharding.gather(each, "mlp") for each in jnp.split(both, 2, axis=1))
        gate = cut(gate, self.cutoff)
        if products.isa is None:
            return (flatly(lambda flat: activate(flat, activation), gate) * up).astype(dtype)
        live = jnp.ones(len(x), bool) if products.live is None else products.live
        both = jnp.concatenate([gate, up], axis=1)
        bias = jnp.zeros(both.shape[1], jnp.float32)
        return activated(both, bias, activation, dtype, (products.isa, live), gated=True)


class AlternatingLayer(nnx.Module):
    """A layer of S streams, by the parts of a `Layer`. It computes the first."""

    def __init__(self, make: LeafMaker, index: int, form: AlternatingForm) -> None:
        make = make.of_layer(index)
        self.sharding = make.sharding
        c = self.config = make.sharding.config
        self.is_last = index + 1 == c.num_hidden_layers
        self.altup, self.laurel = Updates(make, c, form), Laurel(make, c, form)
        self.mixer, cutoff = mixers_of(make, c, index)[0], form.cutoffs[index]
        plain = Mlp(make, c.hidden_size, c.intermediate_size, "mlp", bias=False, adapted=True)
        self.mlp = plain if cutoff is None else CutMlp(make, c, cutoff)
        self.input_norm, self.post_attention_norm = StreamNorm(make, c), StreamNorm(make, c)
        self.pre_feedforward_norm, self.post_feedforward_norm = StreamNorm(make, c), StreamNorm(make, c)
        self.end = LayerEnd(make, c, index)
        self.scales_end = form.correct_scale

    def __call__(self, x: jax.Array, call: Call) -> jax.Array:
        """The streams `[S, N, D]`, float32, after this layer; after the last, only for rows in `call.read`."""
        products, norm, mixer = call.products, self.input_norm(), self.mixer
        assert mixer is not None
        predicted = lax.optimization_barrier(self.altup.predicted(x, products))
        mixed = mixer(predicted[0], norm, call)
        if self.is_last and call.read is not None:
            products = products.for_rows(call.read)
        attended = self.sharding.gather(mixer.output(products, mixed), "residual")
        residual = _sum(predicted[0], normed(attended, self.post_attention_norm()))
        residual = self.laurel(products, predicted[0], norm, residual)
        hidden = self.mlp(products, residual, self.pre_feedforward_norm(), self.config.hidden_act)
        computed = self.sharding.gather(self.mlp.down(products, hidden), "residual")
        made = _sum(residual, normed(computed, self.post_feedforward_norm()))
        x = lax.optimization_barrier(self.altup.corrected(predicted, made, products))
        added = self.end.added(products, self.altup.scaled(x[0]) if self.scales_end else x[0], call)
        return lax.optimization_barrier(jnp.concatenate([x[:1], _sum(x[1:], added)]))


def _sum(x: jax.Array, added: jax.Array) -> jax.Array:
    """Both rounded before, in every graph."""
    return cast("jax.Array", lax.optimization_barrier(x + lax.optimization_barrier(added)))


def cut(gate: jax.Array, cutoff: np.float32) -> jax.Array:
    """By how much `gate [N, F]` exceeds its mean plus `cutoff` standard deviations; 0 if it does not.

    Of normally distributed values, a fixed share is left ("Gaussian top-k"): for 5 % of them, `cutoff` is 1.645.
    """
    away = lax.optimization_barrier(centred(gate))
    deviation = jnp.sqrt(sum_last(lax.optimization_barrier(away * away)) / gate.shape[1])
    return jnp.maximum(away - lax.optimization_barrier(deviation * cutoff), 0)


def _as_large(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x [N, D]` with the root mean squares of the rows of another."""

    def mean_square(x: jax.Array) -> jax.Array:
        return sum_last(lax.optimization_barrier(x * x)) / x.shape[1]

    return lax.optimization_barrier(
        x * (jnp.sqrt(mean_square(like)) / jnp.sqrt(jnp.maximum(mean_square(x), 1e-5)))
    )
