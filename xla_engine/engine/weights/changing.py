"""What callers change of the weights between two steps: adapters, and the weights of the model themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.locked import locked
from xla_engine.engine.reporting import Reporting
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.model_loader.checkpoint import given_weights
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.scheduler.continuation import forget_slots


class ChangingWeights(Reporting):
    """An engine whose weights may change while it runs. Nothing is compiled for it."""

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request asks for it; False where it was loaded. Raises InvalidRequestError."""
        self.check_open()
        known = lora_request.lora_int_id in self.adapters.ids
        self.adapters.of(lora_request)
        return not known

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Let go of an adapter; False where it is not loaded. Raises InvalidRequestError while requests have it."""
        return self.adapters.remove(lora_id)

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, which then makes no room for others; False where it is not loaded."""
        return self.adapters.pin(lora_id)

    def identity(self) -> EngineIdentity:
        """Also the pinned adapters, which results may name as their model."""
        found, pinned = super().identity(), self.adapters.pinned
        return replace(found, config={**found.config, "adapters": pinned}) if pinned else found

    @locked
    def list_loras(self) -> set[int]:
        """Ids of the adapters that are loaded."""
        return self.adapters.ids

    @locked
    def adapter_named(self, name: str | None) -> LoRARequest | None:
        """The loaded adapter that a request means by its `model`; None: the model itself.

        Raises InvalidRequestError where adapters are loaded, and the name is neither theirs nor that of the model.
        """
        if name is None or not self.adapters.ids:
            return None
        found = self.adapters.named(name)
        if found is None and name != self.checkpoint.path.name:
            names = ", ".join((self.checkpoint.path.name, *self.adapters.names))
            raise InvalidRequestError(f"there is no model {name!r}; here are {names}")
        return found

    @locked
    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take new weights between two steps: names and shapes are those of the checkpoint's tensors.

        weights: numpy or jax arrays of floats, all of the checkpoint's tensors or some. Where several make up one
            weight (queries, keys and values; gates and ups), all of these. They are converted to the type of the
            engine and packed for this CPU. Old and new weights are in memory together for a moment.

        What follows has the bits of an engine that was started from the new checkpoint. Cached prefixes, kept and
        saved requests are forgotten; adapters stay. `identity` names the change, and not the checkpoint it equals.

        Raises InvalidRequestError while requests run or wait: a request has one set of weights, from its first token
        to its last. Let them end, or abort them. Raises CheckpointError for a name, shape or value that cannot be;
        then nothing is changed.
        """
        self.check_open()
        if self.has_work:
            raise InvalidRequestError(
                "requests are under way, and each has one set of weights: call update_weights when they have ended "
                "(drain), or abort them (abort_all)"
            )
        if self.config.speculation is not None and self.config.speculation.method == "mtp":
            raise InvalidRequestError("the layer of method 'mtp' would keep its weights: use another method")
        fresh, digest = given_weights(self.checkpoint, dict(weights))
        try:
            self.runner.replace_weights(fresh)
        except MemoryError as error:
            raise CheckpointError(f"no memory for old and new weights together: {error}") from error
        self.scheduler.reset_prefix_cache()
        forget_slots(self.scheduler)
        self.forget_kept()
        if self._shadow is not None:
            self._shadow.forget_all()
        identity = hashlib.sha256(f"{self.checkpoint.fingerprint}\0{digest}".encode()).hexdigest()
        self.checkpoint = replace(self.checkpoint, fingerprint=identity)
