"""The decoder: weights and what one row of it computes. It knows no cache, batch or request.

flax.nnx describes the parameters; a graph receives them as a flat list of leaves and merges inside its trace
(`merge`), because a Module or State that crosses a jit boundary costs milliseconds per call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphs.attention import Attention
from graphs.attention_xla import XlaAttention
from graphs.config import ModelConfig
from graphs.projection import Norm, Products

# (layer index, fused projection [N, (H + 2 KV) Dh] float32, not yet rotated) -> [N, H Dh]
Attend = Callable[[int, jax.Array], jax.Array]


_XLA_ATTENTION = XlaAttention()


class Layer(nnx.Module):
    """Parameters of one pre-norm transformer layer; linear weights are `[out, in]`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        c = config
        self.input_norm = _ones(c.hidden_size)
        self.qkv = _zeros((c.qkv_features, c.hidden_size), dtype)
        self.output = _zeros((c.hidden_size, c.num_attention_heads * c.head_dim), dtype)
        self.post_attention_norm = _ones(c.hidden_size)
        self.gate_up = _zeros((2 * c.intermediate_size, c.hidden_size), dtype)
        self.down = _zeros((c.hidden_size, c.intermediate_size), dtype)


class Decoder(nnx.Module):
    """A Llama-family decoder. Residual stream and norms are float32; products run in the weights' dtype."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed = _zeros((config.vocab_size, config.hidden_size), dtype)
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.final_norm = _ones(config.hidden_size)
        if not config.tie_word_embeddings:
            self.head = _zeros((config.vocab_size, config.hidden_size), dtype)

    def hidden(self, tokens: jax.Array, attend: Attend, products: Products) -> jax.Array:
        """Residual stream behind the last layer of `tokens [N]`: float32 `[N, D]`.

        `attend` knows positions and owns the cache: it rotates q and k, stores k and v wherever they belong and
        returns the attention output.
        `products` is the form that suits the graph.
        """
        eps = self.config.rms_norm_eps
        x = self.embed[...][tokens].astype(jnp.float32)  # [N, D]
        for index, layer in enumerate(self.layers):
            before = Norm(layer.input_norm[...], eps), Norm(layer.post_attention_norm[...], eps)
            attended = attend(index, products.linear(layer.qkv[...], x, norm=before[0]))
            x = products.linear(layer.output[...], attended, residual=x)
            hidden = products.gated(layer.gate_up[...], x, norm=before[1])
            x = products.linear(layer.down[...], hidden, residual=x)
        return x

    def logits(self, x: jax.Array, products: Products) -> jax.Array:
        """Vocabulary-major logits of the residual stream `[N, D]`: float32 `[V, N]`."""
        head = self.embed if self.config.tie_word_embeddings else self.head
        return products.head(head[...], Norm(self.final_norm[...], self.config.rms_norm_eps), x)


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape, dtype))


def _ones(size: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.ones((size,), jnp.float32))


class ModelSpec:
    """What is static of a model: how to name, order and merge the flat leaves a graph receives, and how it attends."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attention: Attention = _XLA_ATTENTION,
        products: Products | None = None,
    ) -> None:
        """`products`: None takes XLA's, in the operand order that suits each graph."""
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.attention = attention
        self.products = products
        abstract = nnx.eval_shape(lambda: Decoder(config, dtype))
        self._graph, state = nnx.split(abstract)
        paths, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self.names = tuple(_leaf_name(path) for path, _ in paths)
        self.leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in paths)

    def flatten(self, weights: Mapping[str, Any]) -> list[Any]:
        """Order named weights as the graphs expect them; a missing or extra name is a KeyError."""
        self.check_names(weights)
        return [weights[name] for name in self.names]

    def check_names(self, weights: Mapping[str, Any]) -> None:
        """Raise KeyError unless `weights` has exactly the names of this model's leaves."""
        if set(weights) != set(self.names):
            raise KeyError(f"weights do not match the model: {sorted(set(weights) ^ set(self.names))}")

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
