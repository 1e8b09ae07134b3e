"""The decoder: weights and what one row of it computes. It knows no cache, batch or request.

flax.nnx describes the parameters; a graph receives them as a flat list of leaves and merges inside its trace
(`merge`), because a Module or State that crosses a jit boundary costs milliseconds per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from xla_engine.graphs.attention.backend import Attention, AttentionWeights
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.delta_net.layer import DeltaWeights
from xla_engine.graphs.delta_net.native import fits
from xla_engine.graphs.linear.int8 import SUFFIX, quantize_weight
from xla_engine.graphs.linear.products import LEAST, FeatureMajor, Norm, Products, gathered, looked_up
from xla_engine.graphs.lora.form import DOWN, LEAVES, RANKS, TARGETS, UP, LoraForm, Matrices
from xla_engine.graphs.lora.products import of_weight
from xla_engine.graphs.lora.shares import cut_of, local_ends
from xla_engine.graphs.model.sublayers import DeltaNet, RoutedMlp, all_heads, matrix, ones, weight_of, zeros
from xla_engine.graphs.ops.norms import centred, rms_norm
from xla_engine.graphs.sampling.logits import Logits
from xla_engine.graphs.sharding import Sharding

# (layer index, fused projection [N, (H + 2 KV) Dh] float32, not yet rotated, the attention's own weights) -> [N, H Dh]
# of a linear layer: (index, [N, projected features], its own weights) -> [N, inner features]
Attend = Callable[[int, jax.Array, AttentionWeights | DeltaWeights], jax.Array]

# What layers call the weights of `Products.linear` and `Products.gated`, where these are matrices.
LINEAR = ("qkv", "output", "gate_up", "down", "router", "shared_gate_up", "shared_down", "projected")
_XLA_ATTENTION = XlaAttention()


class Layer(nnx.Module):
    """Parameters of one transformer layer, as many as the configuration asks for; linear weights are `[out, in]`."""

    def __init__(
        self, sharding: Sharding, index: int, dtype: jnp.dtype, lora: LoraForm | None = None
    ) -> None:
        self.sharding = sharding
        c = self.config = sharding.config
        d = c.hidden_size
        if c.pre_norm:
            self.input_norm = ones(d)
        if c.is_linear(index):
            assert c.delta is not None
            self.delta = DeltaNet(c.delta, d, dtype, sharding)
        else:
            self._init_attention(c, dtype)
        if c.post_norm:
            self.post_attention_norm = ones(d)
        if c.pre_norm and not c.use_parallel_residual:
            self.pre_feedforward_norm = ones(d)
        experts = c.experts_of(index)
        if experts is not None:
            self.experts = RoutedMlp(experts, d, dtype, sharding)
        else:
            matrix(self, "gate_up", (2 * c.intermediate_size, d), dtype)
            matrix(self, "down", (d, c.intermediate_size), dtype)
            if c.mlp_bias:
                self.gate_up_bias = zeros((2 * c.intermediate_size,))
                self.down_bias = zeros((d,))
        if c.post_norm:
            self.post_feedforward_norm = ones(d)
        for target in () if lora is None else TARGETS:
            assert lora is not None
            for name, shape in lora.shapes(c, target).items():
                setattr(self, name, zeros(shape, lora.dtype_of(name)))

    def _init_attention(self, c: ModelConfig, dtype: jnp.dtype) -> None:
        d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
        matrix(self, "qkv", (c.qkv_features, d), dtype)
        if c.qkv_bias:
            self.qkv_bias = zeros((c.qkv_features,))
        if c.qk_norm is not None:
            whole = c.qk_norm == "all"
            self.q_norm = ones(heads if whole else c.head_dim)
            self.k_norm = ones(c.num_key_value_heads * c.head_dim if whole else c.head_dim)
        if c.attention_sinks:
            self.sinks = zeros((c.num_attention_heads,))
        matrix(self, "output", (d, heads), dtype)
        if c.output_bias:
            self.output_bias = zeros((d,))

    def __call__(
        self, index: int, x: jax.Array, attend: Attend, products: Products, read: jax.Array | None
    ) -> jax.Array:
        """The residual stream `[N, D]` behind this layer; `read` as in `Decoder.through`."""
        c, behind = self.config, products if read is None else products.for_rows(read)
        if c.is_linear(index):
            residual = self.delta(index, x, self._norm("input_norm"), attend, products)
        else:
            residual = self._attention(index, x, attend, products, behind)
        source, norm = x, self._norm("input_norm")
        if not c.use_parallel_residual:
            source, norm = residual, self._norm("pre_feedforward_norm")
        source = centred(source) if c.layer_norm else source
        if c.experts_of(index) is not None:
            return self.experts(source, residual, norm, behind)
        bias = self._parameter("gate_up_bias")
        hidden = of_weight(behind, self._matrices("gate_up")).gated(
            weight_of(self, "gate_up"), source, norm=norm, bias=bias, activation=c.hidden_act
        )
        hidden = gathered(hidden, self.sharding, "mlp")
        return self._project_residual("down", hidden, residual, "post_feedforward_norm", behind)

    def _attention(
        self, index: int, x: jax.Array, attend: Attend, products: Products, behind: Products
    ) -> jax.Array:
        c = self.config
        source = centred(x) if c.layer_norm else x
        qkv = of_weight(products, self._matrices("qkv")).linear(
            weight_of(self, "qkv"), source, norm=self._norm("input_norm"), bias=self._parameter("qkv_bias")
        )
        qkv = self.sharding.own_heads(qkv)
        gate = None
        if c.attn_output_gate:
            queries = self.sharding.local.num_attention_heads * c.head_dim
            qkv, gate = jnp.split(qkv, [qkv.shape[1] - queries], axis=1)
        own = AttentionWeights(sinks=self._parameter("sinks"))
        if c.qk_norm == "head":
            own = own._replace(q_norm=self._parameter("q_norm"), k_norm=self._parameter("k_norm"))
        elif c.qk_norm == "all":
            qkv = self._normed_whole(qkv)
        attended = attend(index, qkv, own)
        attended = all_heads(attended, gate, self.sharding)
        return self._project_residual("output", attended, x, "post_attention_norm", behind)

    def _project_residual(
        self, name: str, x: jax.Array | FeatureMajor, residual: jax.Array, norm: str, products: Products
    ) -> jax.Array:
        """`residual` plus the product of the weight `name` with x, normed and scaled where the model does so."""
        weight, bias, post = weight_of(self, name), self._parameter(f"{name}_bias"), self._norm(norm)
        products = of_weight(products, self._matrices(name))
        if post is None and self.config.residual_multiplier == 1:
            own = self.sharding.own(residual, "residual")
            return self.sharding.gather(products.linear(weight, x, bias=bias, residual=own), "residual")
        out = self.sharding.gather(products.linear(weight, x, bias=bias), "residual")
        out = out if post is None else rms_norm(out, *post)
        return residual + self.config.residual_multiplier * out

    def _normed_whole(self, qkv: jax.Array) -> jax.Array:
        """Queries of all heads normalised together, and keys (OLMo 2)."""
        q_norm, k_norm, eps = self.q_norm[...], self.k_norm[...], self.config.rms_norm_eps
        sharding, c = self.sharding, self.sharding.local
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q, k, v = jnp.split(qkv, [queries, queries + keys], axis=1)
        q = sharding.own(rms_norm(sharding.gather(q, "queries"), q_norm, eps), "queries")
        k = sharding.own(rms_norm(sharding.gather(k, "keys"), k_norm, eps), "keys")
        return jnp.concatenate([q, k, v], axis=1)

    def _parameter(self, name: str) -> jax.Array | None:
        """The parameter `name` if this model has it."""
        parameter = getattr(self, name, None)
        return None if parameter is None else parameter[...]

    def _matrices(self, name: str) -> Matrices | None:
        """Those of the adapters for the weight `name`, if there is room for any."""
        down = self._parameter(name + DOWN)
        if down is None:
            return None
        up, ranks = (getattr(self, name + kind)[...] for kind in (UP, RANKS))
        return Matrices(down, up, ranks, local_ends(self.sharding, name))

    def _norm(self, name: str) -> Norm | None:
        weight = self._parameter(name)
        return None if weight is None else Norm(weight, self.config.rms_norm_eps)


class Decoder(nnx.Module):
    """A decoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(
        self,
        sharding: Sharding,
        dtype: jnp.dtype,
        *,
        quantized: bool = False,
        lora: LoraForm | None = None,
    ) -> None:
        self.config, self.dtype, self.sharding = sharding.config, dtype, sharding
        config = sharding.config
        kept = jnp.dtype(jnp.int8) if quantized else dtype
        matrix(self, "embed", (config.vocab_size, config.hidden_size), kept)
        self.layers = nnx.List(
            [Layer(sharding, index, kept, lora) for index in range(config.num_hidden_layers)]
        )
        self.final_norm = ones(config.hidden_size)
        if not config.tie_word_embeddings:
            matrix(self, "head", (config.vocab_size, config.hidden_size), kept)

    def hidden(self, tokens: jax.Array, attend: Attend, products: Products) -> jax.Array:
        """Residual stream behind the last layer of `tokens [N]`: float32 `[N, D]`; anything where not `products.live`.

        `attend` knows positions and owns the cache: it rotates q and k, stores k and v wherever they belong and
        returns the attention output. `products` is the form that suits the graph.
        """
        return [*self.through(self.embedded(tokens, products), attend, products)][-1]

    def embedded(self, tokens: jax.Array, products: Products) -> jax.Array:
        """The residual stream of `tokens [N]` before the first layer: float32 `[N, D]`."""
        embed = weight_of(self, "embed")
        is_head = self.config.tie_word_embeddings
        lookup = products.embedded if is_head else looked_up
        x = lookup(embed, tokens, self.sharding)
        if self.config.embedding_multiplier != 1:  # Gemma's is rounded to the weights' dtype
            multiplier = jnp.asarray(self.config.embedding_multiplier, self.dtype).astype(jnp.float32)
            x = lax.optimization_barrier(x * multiplier)  # rounded by itself, as scales are in `look_up`
        return x

    def through(
        self, x: jax.Array, attend: Attend, products: Products, read: jax.Array | None = None
    ) -> Iterator[jax.Array]:
        """The residual stream `x [N, D]` before each layer and behind all, there at the rows `read [N]`; None: all."""
        yield x
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend, products, None if index + 1 < len(self.layers) else read)
            yield x

    def normed(self, x: jax.Array) -> jax.Array:
        """`x [N, D]` behind the last norm."""
        c = self.config
        return rms_norm(centred(x) if c.layer_norm else x, self.final_norm[...], c.rms_norm_eps)

    def logits(self, x: jax.Array, products: Products) -> Logits:
        """Logits of the residual stream `[N, D]`, float32."""
        c = self.config
        head = weight_of(self, "embed" if c.tie_word_embeddings else "head")
        x = centred(x) if c.layer_norm else x

        def shaped(logits: jax.Array) -> jax.Array:
            logits = logits if c.logit_scale == 1 else logits * c.logit_scale
            if (cap := c.final_logit_softcapping) is None:
                return logits
            flat = lax.optimization_barrier(logits.reshape(-1))  # as in a gated MLP
            return (cap * jnp.tanh(flat / cap)).reshape(logits.shape)

        found = products.head(head, Norm(self.final_norm[...], c.rms_norm_eps), x, self.sharding)
        return cast("Logits", jax.tree.map(shaped, found))


class ModelSpec:
    """What is static of a model: how to name, order and merge the flat leaves a graph receives, and how it attends."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attention: Attention = _XLA_ATTENTION,
        products: Products | None = None,
        *,
        quantized: bool = False,
        devices: int | None = None,
        lora: LoraForm | None = None,
    ) -> None:
        """`products`: None takes XLA's, in the operand order that suits each graph. `quantized`: matrices in int8.
        `devices`: those of a mesh on which the graphs run; None: one, without a mesh. `lora`: room for adapters."""
        self.config = config
        task, least = (1, LEAST) if products is None else (products.task, 1)
        self.sharding = Sharding(config, devices, task, least)
        self.dtype = jnp.dtype(dtype)
        self.attention = attention
        self.products = products
        # Of the operations in C++, if there are any.
        self.isa = attention.isa or (None if products is None else products.isa)
        self.quantized = quantized
        self.lora = lora
        abstract = nnx.eval_shape(lambda: Decoder(self.sharding, dtype, quantized=quantized, lora=lora))
        self._graph, state = nnx.split(abstract)
        paths, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self.names = tuple(_leaf_name(path) for path, _ in paths)
        self.shapes = {name: leaf.shape for name, (_, leaf) in zip(self.names, paths, strict=True)}
        self.leaves = tuple(
            jax.ShapeDtypeStruct(self.local_shape(name), leaf.dtype)
            for name, (_, leaf) in zip(self.names, paths, strict=True)
        )

    @property
    def local(self) -> ModelConfig:
        """The model with the heads that one device has."""
        return self.sharding.local

    def local_shape(self, name: str, devices: int = 1) -> tuple[int, ...]:
        """Shape of what so many devices hold of a leaf; `leaves` are what one holds."""
        cut = cut_of(self.sharding, name)
        return self.shapes[name] if cut is None else cut.shape(self.shapes[name], devices)

    @property
    def native_state(self) -> str | None:
        """The instruction set of linear layers in C++: where attention is, and their heads are whole vectors."""
        delta = self.config.delta
        return None if delta is None or not fits(delta) else self.attention.isa

    def flatten(self, weights: Mapping[str, Any]) -> list[Any]:
        """Order named weights as the graphs expect them; a missing or extra name is a KeyError."""
        self.check_names(weights)
        return [weights[name] for name in self.names]

    def stored(self, name: str, leaf: np.ndarray) -> dict[str, np.ndarray]:
        """What this model keeps of the leaf `name` of a checkpoint, in the order in which its products read it."""
        if name + SUFFIX in self.names:
            values, scale = quantize_weight(leaf)
            return {name: self._packed(name, values), name + SUFFIX: scale}
        return {name: self._packed(name, leaf)}

    def _packed(self, name: str, leaf: np.ndarray) -> np.ndarray:
        if self.products is None or leaf.ndim != 2:
            return leaf
        if name == ("embed" if self.config.tie_word_embeddings else "head"):
            return self.products.pack_head(leaf)
        return self.products.pack(leaf) if name.rsplit(".", 1)[-1] in LINEAR else leaf

    @property
    def sources(self) -> tuple[str, ...]:
        """The leaves that a checkpoint has to have."""
        return tuple(name for name in self.names if not name.endswith((SUFFIX, *LEAVES)))

    @property
    def adapter_leaves(self) -> tuple[str, ...]:
        """The leaves that hold the matrices of adapters."""
        return tuple(name for name in self.names if name.endswith(LEAVES))

    def check_names(self, weights: Mapping[str, Any]) -> None:
        """Raise KeyError unless `weights` has exactly the names of this model's leaves."""
        if set(weights) != set(self.sources):
            raise KeyError(f"weights do not match the model: {sorted(set(weights) ^ set(self.sources))}")

    def merge(self, leaves: list[jax.Array]) -> Decoder:
        """Rebuild the decoder around traced leaves; call inside a graph only."""
        return nnx.merge(self._graph, jax.tree_util.tree_unflatten(self._tree, leaves))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Leaf name to shape, in the order graphs receive them."""
    spec = ModelSpec(config, jnp.dtype(jnp.bfloat16))
    return {name: leaf.shape for name, leaf in zip(spec.names, spec.leaves, strict=True)}


def _leaf_name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return ".".join(part for part in parts if part != "value")
