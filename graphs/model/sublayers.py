"""The parts of a layer: products, norms, attention, MLPs. A part that a model does not have is None."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from xla_engine.graphs import config as layer_types  # no constant here: see `decoder`
from xla_engine.graphs import forms
from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.experts.routing import Experts, Groups, Route, route, route_by_sigmoid
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.linear.by_head import by_head
from xla_engine.graphs.linear.products import (
    Activation,
    Input,
    Norm,
    Products,
    Role,
    Term,
    Weight,
    activate,
    gathered,
    kept_dtype,
    normed,
)
from xla_engine.graphs.lora.form import Matrices, part_ends
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.model.parameters import LeafMaker, Param
from xla_engine.graphs.ops.coded import Coded, CodedForm, Order, coded_form
from xla_engine.graphs.ops.encoder_rows import activated
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.int8 import Quantized
from xla_engine.graphs.ops.norms import flatly, rms_norm
from xla_engine.graphs.recurrent.kind import ConvolutionWeights, DeltaWeights, MambaWeights
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.sharding import Cut, Kind, Sharding


class AdapterMatrices(nnx.Module):
    """The matrices of all adapters for one weight, as `LoraForm.shapes` says.

    With several devices, each holds all of A, and of B the same features as of the weight itself. So each computes A x
    as a single device does, and B's sums run over the whole rank on one device: no bit depends on the number of
    devices, unless those of the weight itself do.
    """

    def __init__(self, make: LeafMaker, inputs: int, target: str, cut: Cut | None) -> None:
        form, sharding = make.lora, make.sharding
        assert form is not None
        a, b, rank = (
            Leaf(shape=shape, dtype=form.dtype_of(name), role="adapter")
            for name, shape in form.shapes(inputs, part_ends(sharding.config, target)).items()
        )
        self.a, self.rank = make.parameter(a), make.parameter(rank)
        self.b = make.parameter(b if cut is None else replace(b, cut=Cut(2, cut.rows)))
        self.ends = part_ends(sharding.config, target)
        if cut is not None:  # the ends of the parts in one device's shard
            width = cut.rows.shape[1]
            parts = {"qkv": part_ends(sharding.local, target), "gate_up": (width // 2, width)}
            self.ends = parts.get(target, (width,))

    @property
    def matrices(self) -> Matrices:
        return Matrices(self.a[...], self.b[...], self.rank[...], self.ends)


class Linear(nnx.Module):
    """The weight `[F, D]` of a product, with scales if it is int8, and perhaps a bias `[F]` and adapters.

    cut: the shard of its rows. target: its name in adapters (`graphs.lora.form.TARGETS`); None: adapters skip it.
    factor: of the output where it is added to the residual stream.
    """

    def __init__(
        self,
        make: LeafMaker,
        shape: tuple[int, int],
        cut: Cut | None,
        *,
        bias: bool = False,
        target: str | None = None,
        role: Role = "linear",
        factor: float = 1.0,
    ) -> None:
        self.weight, self.factor = make.matrix(shape, cut, role), factor
        self.form: CodedForm | None = None
        self.scale = make.scales(shape, cut)
        self.bias = make.vector(shape[0], cut) if bias else None
        room = make.lora is not None
        self.lora = AdapterMatrices(make, shape[1], target, cut) if room and target is not None else None

    def keep(self, make: LeafMaker, stored: tuple[tuple[str, int], ...], order: Order) -> None:
        """Keep the file's encoding of the weight, if that is supported. stored: how the file stores its rows."""
        self.weight, self.form = kept(make, self.weight, stored, order)

    @property
    def values(self) -> Weight:
        """The weight as products take it."""
        return held(self.weight, self.scale, self.form)

    def __call__(
        self, products: Products, x: Input, *, norm: Norm | None = None, residual: Term = None
    ) -> jax.Array:
        """See `Products.linear`."""
        own = products.of_weight(None if self.lora is None else self.lora.matrices)
        return own.linear(self.values, x, norm=norm, bias=value(self.bias), residual=residual)

    def gated(
        self, products: Products, x: jax.Array, norm: Norm | None = None, activation: Activation = "silu"
    ) -> Input:
        own = products.of_weight(None if self.lora is None else self.lora.matrices)
        return own.gated(self.values, x, norm=norm, bias=value(self.bias), activation=activation)


class AttentionMixer(nnx.Module):
    """Attention without its last product, `output`, which the layer adds to the residual stream."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        self.config, self.index, self.sharding = c, index, make.sharding
        d, heads, sharding = c.hidden_size, c.num_attention_heads, make.sharding
        self.qkv = Linear(make, (c.qkv_features, d), sharding.cut_qkv, bias=c.qkv_bias, target="qkv")
        queries, keys = (heads, c.num_key_value_heads) if c.qk_norm == "all" else (1, 1)
        self.q_norm = make.vector(queries * c.head_dim) if c.qk_norm else None
        self.k_norm = make.vector(keys * c.head_dim) if c.qk_norm and c.stored_parts else None
        self.sinks = make.vector(heads, sharding.cut_sinks) if c.attention_sinks else None
        shape, cut = (d, heads * c.head_dim), sharding.cut("residual")
        factor = c.attention_output_multiplier
        self.output = Linear(make, shape, cut, bias=c.output_bias, target="output", factor=factor)

    def __call__(self, x: jax.Array, norm: Norm | None, call: Call) -> jax.Array:
        """The output of all heads for the normalised `x [N, D]`: `[N, H Dh]`."""
        qkv = self.sharding.own_heads(self.qkv(call.products, x, norm=norm))
        gate, q_norm, k_norm = None, value(self.q_norm), value(self.k_norm)
        if self.config.attn_output_gate:
            queries = self.sharding.local.num_attention_heads * self.config.head_dim
            qkv, gate = jnp.split(qkv, [qkv.shape[1] - queries], axis=1)
        if self.config.qk_norm == "all" and q_norm is not None and k_norm is not None:
            qkv, q_norm, k_norm = self._normed_whole(qkv, q_norm, k_norm), None, None
        own = AttentionWeights(q_norm, k_norm, value(self.sinks))
        return all_heads(call.attend(self.index, qkv, own), gate, self.sharding)

    def _normed_whole(self, qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> jax.Array:
        """Normalise the queries of all heads together, and likewise the keys (OLMo 2)."""
        sharding, c, eps = self.sharding, self.sharding.local, self.config.rms_norm_eps
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q, k, v = jnp.split(qkv, [queries, queries + keys], axis=1)
        q = sharding.own(rms_norm(sharding.gather(q, "queries"), q_norm, eps), "queries")
        k = sharding.own(rms_norm(sharding.gather(k, "keys"), k_norm, eps), "keys")
        return jnp.concatenate([q, k, v], axis=1)


class DeltaNet(nnx.Module):
    """A gated DeltaNet layer (`graphs.recurrent.delta_net`) without its last product, `output`."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        form, d = c.delta, c.hidden_size
        assert form is not None
        self.form, self.index, self.sharding, rank = form, index, make.sharding, form.gate_rank
        projected, mixed, heads = make.sharding.cut_recurrent
        self.projected = Linear(make, (form.fused_rows, d), projected, target="projected")
        self.gate = Linear(make, (form.inner_features, rank), None) if rank else None
        self.step = Linear(make, (form.decay_features, rank), None) if rank else None
        self.convolution = make.unquantized.matrix((form.mixed_features, form.kernel), mixed)
        self.decay = make.vector(form.value_heads, heads)
        self.step_bias = make.vector(form.decay_features, heads)
        self.scale = make.vector(form.value_dim)
        cut = make.sharding.cut("residual")
        self.output = Linear(make, (d, form.inner_features), cut, target="output")

    def __call__(self, x: jax.Array, norm: Norm | None, call: Call) -> jax.Array:
        """The output for the normalised `x [N, D]`: `[N, inner features]`."""
        weights = DeltaWeights(
            self.convolution[...].astype(jnp.float32), self.decay[...], self.step_bias[...], self.scale[...]
        )
        projected = self.projected(call.products, x, norm=norm)
        if self.gate is not None and self.step is not None:
            ends = (self.form.mixed_features, self.form.mixed_features + self.form.gate_rank)
            mixed, gate, rate, step = jnp.split(projected, [*ends, ends[1] + self.form.value_heads], axis=1)
            gate, step = self.gate(call.products, gate), self.step(call.products, step)
            projected = lax.optimization_barrier(jnp.concatenate([mixed, gate, rate, step], axis=1))
        return self.sharding.gather(call.attend(self.index, projected, weights), "values")


class ShortConvolution(nnx.Module):
    """A short gated convolution (`graphs.recurrent.short_convolution`) without its last product, as `DeltaNet`."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        form, d = c.convolution, c.hidden_size
        assert form is not None
        self.index = index
        shape = (form.projected_features, d)
        self.projected = Linear(make, shape, None, bias=form.bias, target="projected")
        self.convolution = make.unquantized.matrix((form.mixed_features, form.kernel))
        self.convolution_bias = make.vector(form.mixed_features) if form.bias else None
        cut = make.sharding.cut("residual")
        self.output = Linear(make, (d, form.inner_features), cut, bias=form.bias, target="output")

    def __call__(self, x: jax.Array, norm: Norm | None, call: Call) -> jax.Array:
        """The output for the normalised `x [N, D]`: `[N, inner features]`."""
        weights = ConvolutionWeights(self.convolution[...].astype(jnp.float32), value(self.convolution_bias))
        return call.attend(self.index, self.projected(call.products, x, norm=norm), weights)


class LatentMixer(nnx.Module):
    """Latent attention (`LatentForm`) without its last product, `output`, as in `AttentionMixer`.

    All heads attend to one key, which is the value too. Its halves are each half of the rotary part, then half of the
    short vector, and so are those of a query.
    """

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        form, d, heads, sharding = c.latent, c.hidden_size, c.num_attention_heads, make.sharding
        assert form is not None
        self.form, self.index, self.sharding, rank = form, index, sharding, form.q_lora_rank
        self.q_a = Linear(make, (rank, d), None, bias=c.qkv_bias) if rank else None
        self.q_a_norm = make.vector(rank) if rank else None
        self.q_b = Linear(make, (heads * form.query_dim, rank or d), sharding.cut("latent_queries"))
        self.kv_a = Linear(make, (form.key_dim, d), None, bias=c.qkv_bias)
        self.kv_a_norm = make.vector(form.kv_lora_rank)
        plain, short = make.unquantized, form.kv_lora_rank
        of_keys, of_values = sharding.cut("latent_keys"), sharding.cut("latent_values")
        self.k_b = plain.matrix((heads * short, form.qk_nope_head_dim), of_keys, role="linear")
        self.v_b = plain.matrix((heads * form.v_head_dim, short), of_values, role="linear")
        shape = (d, heads * form.v_head_dim)
        self.output = Linear(make, shape, sharding.cut("residual"), bias=c.output_bias)

    def __call__(self, x: jax.Array, norm: Norm | None, call: Call) -> jax.Array:
        """The output of all heads for the normalised `x [N, D]`: `[N, H Dv]`."""
        form, products, rows = self.form, call.products, len(x)
        if self.q_a is None or self.q_a_norm is None:
            q = self.q_b(products, x, norm=norm)
        else:
            short = self.q_a(products, x, norm=norm)
            q = self.q_b(products, short, norm=Norm(self.q_a_norm[...], forms.LATENT_EPS))
        q = self.sharding.own_latent_queries(q).reshape(rows, -1, form.query_dim)  # of this device's heads
        still, turning = jnp.split(q, [form.qk_nope_head_dim], axis=2)
        queries = _in_halves(turning, by_head(products, self.k_b[...], still))
        latent, turning = jnp.split(self.kv_a(products, x, norm=norm), [form.kv_lora_rank], axis=1)
        latent = rms_norm(latent, self.kv_a_norm[...], forms.LATENT_EPS)
        keys = _in_halves(turning[:, None], latent[:, None])
        both = jnp.concatenate([queries, keys], axis=1).reshape(rows, -1)
        attended = call.attend(self.index, lax.optimization_barrier(both), AttentionWeights())
        attended = attended.reshape(rows, -1, 2, form.key_dim // 2)[..., form.qk_rope_head_dim // 2 :]
        attended = lax.optimization_barrier(attended.reshape(rows, -1, form.kv_lora_rank))
        made = by_head(products, self.v_b[...], attended)
        return self.sharding.gather(made.reshape(rows, -1), "latent_values")


def _in_halves(first: jax.Array, second: jax.Array) -> jax.Array:
    """`[N, H, A]` and `[N, H, B]` as `[N, H, A + B]`, half of each and then the other halves."""
    parts = [x.reshape(*x.shape[:2], 2, -1) for x in (first, second)]
    return jnp.concatenate(parts, axis=3).reshape(*first.shape[:2], -1)


class Mamba(nnx.Module):
    """A Mamba-2 layer (`graphs.recurrent.mamba`) without its last product, as `DeltaNet`."""

    def __init__(self, make: LeafMaker, c: ModelConfig, index: int) -> None:
        form, d = c.mamba, c.hidden_size
        assert form is not None
        self.index = index
        shape = (form.projected_features, d)
        self.projected = Linear(make, shape, None, bias=form.bias, target="projected")
        self.convolution = make.unquantized.matrix((form.mixed_features, form.kernel))
        self.convolution_bias = make.vector(form.mixed_features) if form.convolution_bias else None
        self.decay, self.step_bias, self.skip = (make.vector(form.value_heads) for _ in range(3))
        self.scale = make.vector(form.inner_features) if form.norm else None
        cut = make.sharding.cut("residual")
        factor = form.output_multiplier
        shape = (d, form.inner_features)
        self.output = Linear(make, shape, cut, bias=form.bias, target="output", factor=factor)

    def __call__(self, x: jax.Array, norm: Norm | None, call: Call) -> jax.Array:
        """The output for the normalised `x [N, D]`: `[N, inner features]`."""
        weights = MambaWeights(
            self.convolution[...].astype(jnp.float32),
            self.decay[...],
            self.step_bias[...],
            self.skip[...],
            value(self.scale),
            value(self.convolution_bias),
        )
        return call.attend(self.index, self.projected(call.products, x, norm=norm), weights)


Mixer = AttentionMixer | LatentMixer | DeltaNet | ShortConvolution | Mamba


def mixers_of(make: LeafMaker, c: ModelConfig, index: int) -> tuple[Mixer | None, Mixer | None]:
    """The token mixer of layer `index`, and one beside it, if it has them."""
    if c.layer_type(index) == layer_types.MLP:
        return None, None
    if c.layer_type(index) == layer_types.PARALLEL:
        return AttentionMixer(make, c, index), Mamba(make, c, index)
    kinds: dict[str, type[Mixer]] = {
        layer_types.LINEAR: DeltaNet,
        layer_types.CONV: ShortConvolution,
        layer_types.MAMBA: Mamba,
    }
    attention = AttentionMixer if c.latent is None else LatentMixer
    return kinds.get(c.layer_type(index), attention)(make, c, index), None


class Mlp(nnx.Module):
    """A gated MLP without its last product, `down`, which the layer adds to the residual stream."""

    def __init__(
        self, make: LeafMaker, d: int, inner: int, kind: Kind, *, bias: bool, adapted: bool = False
    ) -> None:
        """kind: how its inner features are sharded."""
        self.kind, self.sharding = kind, make.sharding
        up, down = ("gate_up", "down") if adapted else (None, None)
        pairs, residual = make.sharding.cut(kind, paired=True), make.sharding.cut("residual")
        self.gate_up = Linear(make, (2 * inner, d), pairs, bias=bias, target=up)
        self.down = Linear(make, (d, inner), residual, bias=bias, target=down)

    def __call__(
        self, products: Products, x: jax.Array, norm: Norm | None = None, activation: Activation = "silu"
    ) -> Input:
        """The hidden features for the normalised `x [N, D]`, the input of `down`."""
        return gathered(self.gate_up.gated(products, x, norm, activation), self.sharding, self.kind)


class PlainMlp(nnx.Module):
    """As `Mlp`, without a gate."""

    def __init__(self, make: LeafMaker, d: int, inner: int, kind: Kind, *, bias: bool) -> None:
        self.kind, self.sharding, cut = kind, make.sharding, make.sharding.cut(kind)
        self.up = Linear(make, (inner, d), cut)
        self.up_bias = make.vector(inner, cut) if bias else None
        self.down = Linear(make, (d, inner), make.sharding.cut("residual"), bias=bias)

    def __call__(
        self, products: Products, x: jax.Array, norm: Norm | None = None, activation: Activation = "silu"
    ) -> jax.Array:
        """As `Mlp`, for an activation of `graphs.ops.encoder_rows`."""
        before, dtype = self.up(products, x, norm=norm), kept_dtype(self.up.values)
        return self.sharding.gather(
            alone(products, before, value(self.up_bias), activation, dtype), self.kind
        )


class RoutedMlp(nnx.Module):
    """A router and its experts, between two products if they have a latent size; perhaps a shared expert, which may
    have a gate `[1, D]`."""

    def __init__(self, make: LeafMaker, d: int, form: RoutedExperts, factor: float = 1.0) -> None:
        """factor: of the output where it is added to the residual stream."""
        self.form, self.sharding, self.factor = form, make.sharding, factor
        count, (inner, shared, latent) = form.num_experts, form.widths
        self.kind: Kind = "latent" if latent else "residual"  # of what experts take and make
        self.router = Linear(make.unquantized, (count, d), None, bias=form.bias)
        self.into = Linear(make, (latent, d), make.sharding.cut("latent")) if latent else None
        self.out_of = Linear(make, (d, latent), make.sharding.cut("residual")) if latent else None
        width, rows = latent or d, inner if form.plain else 2 * inner
        first, second = make.sharding.cut("expert", 1, paired=not form.plain), make.sharding.cut(self.kind, 1)
        self.gate_up_form: CodedForm | None = None
        self.down_form: CodedForm | None = None
        self.gate_up = make.matrix((count, rows, width), first)
        self.gate_up_scale = make.scales((count, rows, width), first)
        self.down = make.matrix((count, width, inner), second)
        self.down_scale = make.scales((count, width, inner), second)
        self.gate_up_bias = make.vectors((count, rows), first) if form.bias else None
        self.down_bias = make.vectors((count, width), second) if form.bias else None
        shared_mlp = PlainMlp if form.plain else Mlp
        self.shared = shared_mlp(make, d, shared, "shared_expert", bias=False) if shared else None
        gated = shared and form.shared_expert_gate
        self.shared_gate = make.unquantized.matrix((1, d)) if gated else None
        self.correction = make.vector(count) if form.scoring_func == "sigmoid" else None
        self.router_norm = make.vector(d) if form.beside_mlp else None
        self.factors = make.vector(count) if form.beside_mlp else None

    def keep(
        self,
        make: LeafMaker,
        gate_up: tuple[tuple[str, int], ...],
        down: tuple[tuple[str, int], ...],
        order: Order,
    ) -> None:
        """As `Linear.keep`, of the matrices of all experts. Rows of both products are in eight bits, or neither's."""
        forms = (
            kept(make, weight, stored, order)[1]
            for weight, stored in ((self.gate_up, gate_up), (self.down, down))
        )
        order = order if None not in forms else "pairs"
        self.gate_up, self.gate_up_form = kept(make, self.gate_up, gate_up, order)
        self.down, self.down_form = kept(make, self.down, down, order)

    def __call__(self, products: Products, x: jax.Array, norm: Norm | None, residual: jax.Array) -> jax.Array:
        """`residual [N, D]` plus the output of the experts for the normalised `x [N, D]`."""
        form, sharding = self.form, self.sharding
        asked, x = x, normed(x, norm)
        if self.router_norm is not None and norm is not None:
            logits = self.router(products, asked, norm=Norm(self.router_norm[...], norm.eps))
        else:
            logits = self.router(products, x)
        routed = self._routed(logits, products.live)
        up_bias, down_bias = (
            None if bias is None else bias[...].reshape(form.num_experts, -1)
            for bias in (self.gate_up_bias, self.down_bias)
        )
        gate_up = held(self.gate_up, self.gate_up_scale, self.gate_up_form)
        down = held(self.down, self.down_scale, self.down_form)
        experts = Experts(gate_up, down, up_bias, down_bias, form.swiglu_limit, form.gelu, form.plain)
        start = residual if self.factor == 1 else jnp.zeros_like(residual)
        gather = None if sharding.devices is None else functools.partial(sharding.gather, kind="expert")
        given, base = x, start
        if self.into is not None:
            given = sharding.gather(self.into(products, x), "latent")
            base = jnp.zeros_like(given)
        out = products.experts(experts, given, routed, sharding.own(base, self.kind), gather)
        out = sharding.gather(out, self.kind)
        if self.out_of is not None:
            out = self.out_of(products, out, residual=sharding.own(start, "residual"))
            out = sharding.gather(out, "residual")
        if self.shared is not None:
            hidden = self.shared(products, x, activation="relu2" if form.plain else "silu")
            shared = sharding.gather(self.shared.down(products, hidden), "residual")
            if self.shared_gate is not None:
                shared = _sigmoid(sum_last(_rounded(x, self.shared_gate[...]))) * shared
            out = out + shared
        return out if self.factor == 1 else residual + self.factor * out

    def _routed(self, logits: jax.Array, live: jax.Array | None) -> Route:
        form, correction, factor = self.form, value(self.correction), self.form.routed_scaling_factor
        count, groups = form.num_experts_per_tok, Groups(form.n_group, form.topk_group)
        rules: dict[str, Any] = {"renormalise": form.norm_topk_prob, "groups": groups, "live": live}
        if correction is not None:
            return route_by_sigmoid(logits, correction, count, factor=factor, **rules)
        found = route(logits, count, **rules)
        if factor != 1:
            found = found._replace(weight=found.weight * factor)
        if self.factors is None:
            return found
        factors = self.factors[...].at[found.expert].get(mode="clip")
        return found._replace(weight=lax.optimization_barrier(found.weight * factors))


class MlpBesideExperts(nnx.Module):
    """An MLP and routed experts of the same residual stream; each output has a norm, and so has their sum."""

    def __init__(self, make: LeafMaker, c: ModelConfig, form: RoutedExperts) -> None:
        self.config, self.sharding, d = c, make.sharding, c.hidden_size
        self.dense = Mlp(make, d, c.intermediate_size, "mlp", bias=False)
        self.routed = RoutedMlp(make, d, form)
        self.dense_norm, self.routed_norm = make.vector(d), make.vector(d)
        self.routed_input_norm, self.sum_norm = make.vector(d), make.vector(d)

    def __call__(self, products: Products, x: jax.Array, norm: Norm | None, residual: jax.Array) -> jax.Array:
        """As `RoutedMlp`; norm: the MLP's own."""

        def by(weight: Param) -> Norm:
            return Norm(weight[...], self.config.rms_norm_eps)

        hidden = self.dense(products, x, norm, self.config.hidden_act)
        dense = self.sharding.gather(self.dense.down(products, hidden), "residual")
        dense = normed(dense, by(self.dense_norm))
        routed = self.routed(products, x, by(self.routed_input_norm), jnp.zeros_like(x))
        both = lax.optimization_barrier(dense + normed(routed, by(self.routed_norm)))
        return residual + normed(both, by(self.sum_norm))


MlpWithExperts = RoutedMlp | MlpBesideExperts


def mlp_of(make: LeafMaker, c: ModelConfig, index: int) -> Mlp | PlainMlp | MlpWithExperts | None:
    """The MLP of layer `index`, or its experts, or both; None if it has neither."""
    if c.one_sublayer and c.layer_type(index) != layer_types.MLP:
        return None
    if (experts := c.experts_of(index)) is not None:
        if experts.beside_mlp:
            return MlpBesideExperts(make, c, experts)
        return RoutedMlp(make, c.hidden_size, experts, c.residual_multiplier)
    if not c.gated_mlp:
        return PlainMlp(make, c.hidden_size, c.intermediate_size, "mlp", bias=c.mlp_bias)
    gate, down = c.mlp_multipliers  # the norm multiplies gates and ups, so the output is divided by it
    mlp = Mlp(make, c.hidden_size, c.intermediate_size, "mlp", bias=c.mlp_bias, adapted=True)
    mlp.down.factor = down / gate
    return mlp


def alone(
    products: Products, x: jax.Array, bias: jax.Array | None, activation: Activation, dtype: jnp.dtype
) -> jax.Array:
    """The activation of `x [N, F]` plus a bias `[F]` or none, in `dtype`, other than SiLU."""
    assert activation != "silu"
    bias = jnp.zeros(x.shape[1], jnp.float32) if bias is None else bias
    if products.isa is None or activation == "relu2":  # whose bits are the same in any form
        return flatly(functools.partial(activate, activation=activation), x + bias).astype(dtype)
    live = jnp.ones(len(x), bool) if products.live is None else products.live
    return activated(x, bias, activation, dtype, (products.isa, live))


def finished_logits(c: ModelConfig, logits: Logits, bias: jax.Array | None) -> Logits:
    """Logits of the head plus its bias `[V]`, if it has one, scaled and capped as the model does."""
    if bias is not None:
        logits = ByRow(logits.values + bias) if isinstance(logits, ByRow) else logits + bias[:, None]

    def shaped(logits: jax.Array) -> jax.Array:
        logits = logits if c.logit_scale == 1 else logits * c.logit_scale
        if (cap := c.final_logit_softcapping) is None:
            return logits
        flat = lax.optimization_barrier(logits.reshape(-1))  # as in a gated MLP
        return (cap * jnp.tanh(flat / cap)).reshape(logits.shape)

    return cast("Logits", jax.tree.map(shaped, logits))


def kept(
    make: LeafMaker, weight: Param, stored: tuple[tuple[str, int], ...], order: Order
) -> tuple[Param, CodedForm | None]:
    """The parameter of a weight in the encoding of its file, and its form, if that is supported."""
    leaf: Leaf = weight.get_metadata("leaf")
    cut = None if leaf.cut is None else leaf.cut.by_rows(leaf.shape)
    form = coded_form(stored, leaf.shape[-1], None if cut is None else cut.rows, order)
    if form is None:
        return weight, None
    return make.parameter(replace(leaf, dtype=jnp.dtype(jnp.uint8), cut=cut, form=form)), form


def held(weight: Param, scale: Param | None, form: CodedForm | None) -> Weight:
    """A weight as products take it: with its scales if it has any, in the encoding of its file, or plain."""
    if form is not None:
        return Coded(weight[...], form)
    return weight[...] if scale is None else Quantized(weight[...], scale[...])


def value(parameter: Param | None) -> jax.Array | None:
    """The value of a parameter that a model may not have."""
    return None if parameter is None else parameter[...]


def all_heads(attended: jax.Array, gate: jax.Array | None, sharding: Sharding) -> jax.Array:
    """The attention output of all heads `[N, H Dh]`, multiplied by the sigmoid of the gates if there are any.

    attended, gate: the heads of this device. XLA:CPU's exponential of a value may depend on the width of its row, so
    with XLA's products the gates are gathered first and have the width that they have on one device.
    """
    if gate is None:
        return sharding.gather(attended, "queries")
    if sharding.least == 1:
        return sharding.gather(attended * jax.nn.sigmoid(gate), "queries")
    return sharding.gather(attended, "queries") * jax.nn.sigmoid(sharding.gather(gate, "queries"))


def _rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The terms of a product with `weight [1, D]`, with operands rounded as in other products."""
    return x.astype(weight.dtype).astype(jnp.float32) * weight.astype(jnp.float32)


def _sigmoid(value: jax.Array) -> jax.Array:
    """The sigmoid of `value [N, 1]`, on 64 copies: XLA:CPU's exponential of a short row has other bits."""
    return flatly(jax.nn.sigmoid, jnp.broadcast_to(value, (len(value), 64)))[:, :1]
