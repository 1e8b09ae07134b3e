"""Changes of the model's weights between two steps."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xla_engine.config import KEPT, EngineConfig
from xla_engine.engine.state import EngineState
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.model_loader.checkpoint import Checkpoint, check_leaves, given_weights
from xla_engine.model_loader.tensor_files import GivenTensors
from xla_engine.scheduler.continuation import forget_slots


class WeightUpdates:
    """Changes weights of a running engine, without compiling anything.

    checkpoint: describes the current weights.
    """

    def __init__(
        self,
        state: EngineState,
        config: EngineConfig,
        checkpoint: Checkpoint,
    ) -> None:
        self.checkpoint = checkpoint
        self._state = state
        self._config = config

    def update(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """As `XlaBatchEngine.update_weights`; no step may be in flight."""
        self._check()
        self._replace(*given_weights(self.checkpoint, dict(weights)))

    def update_leaves(self, leaves: Mapping[str, np.ndarray]) -> None:
        """As `XlaBatchEngine.update_leaves`; no step may be in flight."""
        self._check()
        check_leaves(self.checkpoint, leaves)
        self._replace(leaves, GivenTensors(dict(leaves)).fingerprint())

    def _check(self) -> None:
        """Raise InvalidRequestError if weights cannot be replaced now."""
        if self._state.has_work:
            raise InvalidRequestError(
                "requests are running or waiting, and each must use one set of weights: call update_weights when "
                "they have ended (drain), or abort them (abort_all)"
            )
        if self._state.hosts is not None:
            raise InvalidRequestError(
                "weights are updated on one host only: start the engine without num_hosts"
            )
        if self._config.quantization in KEPT:
            raise InvalidRequestError(
                f"quantization {self._config.quantization!r} keeps the weights packed as in the file: start the "
                "engine with quantization 'none' to update them"
            )
        if self._config.prefix_cache_dir is not None:
            raise InvalidRequestError(
                "prefix_cache_dir keeps prefixes of the weights that were loaded: start without it to update them"
            )
        if self._config.speculation is not None and self._config.speculation.method == "mtp":
            raise InvalidRequestError("the layer of method 'mtp' would keep its weights: use another method")

    def _replace(self, fresh: Mapping[str, np.ndarray], digest: str) -> None:
        """Replace leaves and forget what was computed with the old ones. digest: of the new ones."""
        state = self._state
        try:
            state.runner.weights.replace(fresh)
        except MemoryError as error:
            raise CheckpointError(f"no memory for old and new weights together: {error}") from error
        state.scheduler.reset_prefix_cache()
        forget_slots(state.scheduler)
        state.table.kept.clear()
        if state.shadow is not None:
            state.shadow.forget_all()
        identity = hashlib.sha256(f"{self.checkpoint.fingerprint}\0{digest}".encode()).hexdigest()
        self.checkpoint = replace(self.checkpoint, fingerprint=identity)
