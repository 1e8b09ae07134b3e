"""A plain forward pass as a reference for the engine: one sequence, recomputed for every token.

It shares only the decoder with the engine; there is no cache, batch, sampler or scheduler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.attention.dense import Stored, attend_densely
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.recurrent.kind import RecurrentWeights
from xla_engine.graphs.recurrent.layer import make_state, recurrent_decode
from xla_engine.graphs.recurrent_forms import Recurrent
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.model_loader.checkpoint import Checkpoint

_PADDING = 64  # sequence lengths are padded to multiples of this, so that few shapes compile


class ForwardPass:
    """Computes logits of one checkpoint by whole forward passes.

    max_model_len: of the engine to compare with, because some rope scalings depend on it.
    quantized: whether weights and activations of matrix products are int8.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_model_len: int | None = None, *, quantized: bool = False
    ) -> None:
        self._context_length = EngineConfig(max_model_len=max_model_len).context_length(
            checkpoint.config.max_position_embeddings
        )
        self._spec = ModelSpec(checkpoint.config, jnp.dtype(checkpoint.dtype), quantized=quantized)
        leaves = self._spec.leaves
        leaves.check_names(checkpoint.weights)
        kept = dict(
            part for name, leaf in checkpoint.weights.items() for part in leaves.stored(name, leaf).items()
        )
        self._weights = jax.device_put([kept[name] for name in leaves])
        self._forward = jax.jit(self._logits)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after every prefix of `token_ids`: float32 `[len(token_ids), V]`."""
        padded = -(-len(token_ids) // _PADDING) * _PADDING
        tokens = np.zeros(padded, np.int32)
        tokens[: len(token_ids)] = token_ids
        rope = rope_tables(self._spec.config, padded, context_length=self._context_length)
        return np.asarray(self._forward(self._weights, rope, tokens))[:, : len(token_ids)].T

    def _logits(self, weights: list[jax.Array], rope: jax.Array, tokens: jax.Array) -> jax.Array:
        model = self._spec.merge(weights)
        config, stored = self._spec.config, dict[int, Stored]()

        def attend(index: int, qkv: jax.Array, own: AttentionWeights | RecurrentWeights) -> jax.Array:
            if not isinstance(own, AttentionWeights):
                return _follow(config.recurrent, own, qkv)
            return attend_densely(config, index, own, qkv, rope, stored)

        *_, hidden = model.hidden(tokens, Call(attend, ROWS_LEFT))
        logits = model.logits(hidden, ROWS_LEFT)
        assert not isinstance(logits, ByRow)  # XLA's products never return it
        return logits


class LogitGap(NamedTuple):
    """The two most likely tokens after a prefix, and their logits."""

    first: int
    second: int
    first_logit: float
    second_logit: float

    @property
    def size(self) -> float:
        """How far the logits are apart."""
        return self.first_logit - self.second_logit


def logit_gap(reference: ForwardPass, prefix: Sequence[int]) -> LogitGap:
    """The two largest logits after `prefix`, by the forward pass without a cache."""
    logits = reference.logits(prefix)[-1]
    second, first = np.argsort(logits, kind="stable")[-2:].tolist()
    return LogitGap(first, second, float(logits[first]), float(logits[second]))


def _follow(form: Recurrent | None, own: RecurrentWeights, projected: jax.Array) -> jax.Array:
    """A recurrent layer over one sequence `[N, projected features]`, position by position."""
    assert form is not None

    def one(state: Any, row: jax.Array) -> tuple[Any, jax.Array]:
        state, out = recurrent_decode(form, own, state, row[None], live=jnp.ones(1, bool))
        return state, out[0]

    return jax.lax.scan(one, make_state(form, 1), projected)[1]
