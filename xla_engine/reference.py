"""The in-house oracle: one sequence, the whole forward pass for every token.

It shares the decoder with the engine and nothing else: no cache, no batch, no sampler, no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from graphs.layers import apply_rope, rope_table, split_heads
from graphs.model import ModelSpec
from graphs.projection import ROWS_LEFT
from xla_engine.checkpoint import Checkpoint

_PADDING = 64  # sequence lengths are padded to multiples of this, so that few shapes compile


class Reference:
    """Full-forward evaluation of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._spec = ModelSpec(checkpoint.config, jnp.dtype(checkpoint.dtype))
        self._weights = jax.device_put(self._spec.flatten(checkpoint.weights))
        self._forward = jax.jit(self._logits)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after every prefix of `token_ids`: float32 `[len(token_ids), V]`."""
        padded = -(-len(token_ids) // _PADDING) * _PADDING
        tokens = np.zeros(padded, np.int32)
        tokens[: len(token_ids)] = token_ids
        rope = rope_table(self._spec.config, padded)
        return np.asarray(self._forward(self._weights, rope, tokens))[:, : len(token_ids)].T

    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation, `max_tokens` tokens."""
        token_ids = list(prompt_token_ids)
        for _ in range(max_tokens):
            token_ids.append(int(np.argmax(self.logits(token_ids)[-1])))
        return token_ids[len(prompt_token_ids) :]

    def _logits(self, weights: list[jax.Array], rope: jax.Array, tokens: jax.Array) -> jax.Array:
        model = self._spec.merge(weights)
        count = tokens.shape[0]
        causal = jnp.tril(jnp.ones((count, count), bool))
        config = self._spec.config

        def attend(_: int, qkv: jax.Array) -> jax.Array:
            q, k, v = split_heads(qkv, config.num_key_value_heads, config.head_dim)
            q, k = apply_rope(q, rope), apply_rope(k, rope)
            groups = q.shape[1] // k.shape[1]
            k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))  # [N, H, Dh]
            scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * q.shape[-1] ** -0.5
            weight = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weight, v, precision="highest").reshape(count, -1)

        return model.logits(model.hidden(tokens, attend, ROWS_LEFT), ROWS_LEFT)
