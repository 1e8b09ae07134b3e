"""A draft head on the device: what the `DeviceProposer`s of methods "mtp" and "eagle3" share."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.kv_cache.footprint import cache_bytes
from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.packing import unpack
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.graphs.steps.draft_head import (
    HeadForm,
    HeadState,
    guess_and_verify,
    make_head_state,
    read_prompts,
)
from xla_engine.runner import memory


class DraftHead(ABC):
    """A `DeviceProposer` with one layer, which reads the hidden states of prefill and verify steps."""

    reads_prompts = True

    def __init__(
        self, method: str, form: HeadForm, config: EngineConfig, context_length: int, weights: int
    ) -> None:
        """weights: bytes of its weights, and of other memory that does not depend on the slots. Raises ConfigError."""
        self._form = form
        self._context_length = context_length
        self._width = max(width for _, width in config.verify_shapes)
        if self._width > config.chunk_size:
            raise ConfigError(f"method {method!r} needs a chunk_size of {self._width} or more")
        layer = form.layer
        hidden = 4 * self._width * layer.config.hidden_size
        self.beside = memory.Beside(weights, cache_bytes(layer, 1, context_length) + hidden)
        self._size = (0, 0)
        self._placed: Any = None
        self._own: list[jax.Array] = []
        self._rope: jax.Array | None = None
        self._state: HeadState | None = None

    @abstractmethod
    def place(self, weights: Mapping[str, jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Load the weights; returns them as the graph takes them, and those arrays that are not the engine's.

        weights: those of the engine's model.
        """

    @property
    def taps(self) -> tuple[int, ...]:
        return self._form.taps

    @property
    def takes(self) -> tuple[Any, ...]:
        return self._placed, self._rope, self._state

    def keep(self, state: HeadState) -> None:
        self._state = state

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        layer = self._form.layer
        self._size = rows, length
        self._placed, self._own = self.place(weights)
        self._rope = jax.device_put(rope_tables(layer.config, self._context_length))
        self._state = make_head_state(layer, rows, length, self._width)

    def step(self, spec: ModelSpec, key_length: int, width: int, *, processed: bool) -> Callable[..., Any]:
        return functools.partial(
            guess_and_verify, self._form, spec, key_length, width, processed_logprobs=processed
        )

    def read(self, spec: ModelSpec, key_length: int, lanes: Any, rows: Rows) -> Callable[..., Any]:
        def run(
            weights: list[jax.Array], rope: jax.Array, seen: jax.Array, work: jax.Array, *own: Any
        ) -> HeadState:
            del rope  # the layer's own
            return read_prompts(self._form, spec, key_length, weights, seen, unpack(work, lanes), rows, *own)

        return run

    def blank(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = make_head_state(self._form.layer, *self._size, self._width)

    def delete(self) -> None:
        for leaf in jax.tree.leaves((self._own, self._rope, self._state)):
            leaf.delete()
        self._own, self._placed, self._rope, self._state = [], None, None, None


def packed(products: Products | None, leaf: np.ndarray) -> np.ndarray:
    """A weight of a checkpoint, packed for the products; vectors stay as they are."""
    return leaf if products is None or leaf.ndim < 2 else products.pack(leaf)
