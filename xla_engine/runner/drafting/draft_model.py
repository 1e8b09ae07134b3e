"""A draft model on the device: its weights and its KV cache."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from xla_engine.config import KEPT, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import whole_spans
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.footprint import cache_bytes, keeps_every_position
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.graphs.steps.draft_model import FED, DraftState, draft_and_verify, make_draft_state
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.runner import memory
from xla_engine.runner.backends import make_spec
from xla_engine.runner.devices import Devices
from xla_engine.utils.startup import silent


class DraftModel:
    """The `DeviceProposer` of method "draft_model"."""

    reads_prompts = False
    taps = ()

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, model: ModelConfig, context_length: int
    ) -> None:
        """model: the engine's. Raises ConfigError if the two do not match."""
        own = checkpoint.config
        if own.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the draft model has {own.vocab_size} token ids and the model {model.vocab_size}; "
                "use one with the same tokenizer"
            )
        if own.max_position_embeddings < context_length:
            raise ConfigError(
                f"the draft model has {own.max_position_embeddings} positions, but requests may have "
                f"{context_length}; "
                f"use max_model_len {own.max_position_embeddings} or less, or another draft model"
            )
        if own.delta is not None:
            raise ConfigError(
                "a draft model with recurrent layers is not supported; use one with attention only"
            )
        self._checkpoint = checkpoint
        stored = stored_kinds(checkpoint.weights)
        if config.quantization in KEPT and not stored:
            config = replace(config, quantization=None)
        dtype = jnp.dtype(checkpoint.dtype)
        self._spec = spec = make_spec(config, own.within(context_length), dtype, stored)
        self._reach = None if keeps_every_position(spec, context_length) else config.call_positions - FED
        self._context_length = context_length
        positions = whole_spans(context_length)
        self.beside = memory.Beside(
            memory.weights_bytes(spec), cache_bytes(spec, 1, context_length) + 4 * positions
        )
        self._size = (0, 0)
        self._weights: list[jax.Array] = []
        self._rope: jax.Array | None = None
        self._state: DraftState | None = None

    @property
    def takes(self) -> tuple[Any, ...]:
        return self._weights, self._rope, self._state

    def keep(self, state: DraftState) -> None:
        self._state = state

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        self._size = rows, length
        self._weights = Devices(None).load(self._spec, self._checkpoint.weights, silent)
        self._rope = jax.device_put(rope_tables(self._spec.config, self._context_length))
        self._state = make_draft_state(self._spec, rows, length)

    def step(self, spec: ModelSpec, key_length: int, width: int, *, processed: bool) -> Callable[..., Any]:
        return functools.partial(
            draft_and_verify, self._spec, self._reach, spec, key_length, width, processed_logprobs=processed
        )

    def read(self, spec: ModelSpec, key_length: int, lanes: Any, rows: Rows) -> Callable[..., Any]:
        raise NotImplementedError("a draft model reads prompts from the rows' tokens")

    def blank(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = make_draft_state(self._spec, *self._size)

    def delete(self) -> None:
        for leaf in jax.tree.leaves(self.takes):
            leaf.delete()
        self._weights, self._rope, self._state = [], None, None
