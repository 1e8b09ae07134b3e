"""What callers change of several engines' weights: their adapters."""

from __future__ import annotations

from dataclasses import replace

from xla_engine.data_parallel.turns import Turns
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.locked import locked
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest


class ChangingAdapters(Turns):
    """Several engines whose adapters come and go while they run, as those of one do (`ChangingWeights`).

    _name: of the model.
    """

    _name: str

    @locked
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter in every engine; False where all had it.

        It is read here, and an engine loads it before anything that is submitted later. Raises InvalidRequestError
        where it cannot be loaded, AdaptersBusyError where an engine has no room for it.
        """
        self._check_open()
        adapter = self._adapters.of(lora_request)
        assert adapter is not None
        return self._adapters.load(adapter)

    @locked
    def remove_lora(self, lora_id: int) -> bool:
        """Let go of an adapter in every engine; False where none has it.

        Raises InvalidRequestError while requests have it.
        """
        return self._adapters.remove(lora_id)

    @locked
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in every engine, which then makes no room for others; False where none has it.

        Raises AdaptersBusyError where an engine has no room for it, or requests would be left without any.
        """
        return self._adapters.pin(lora_id)

    @locked
    def list_loras(self) -> set[int]:
        """Ids of the adapters that an engine has, or that a request waits for."""
        self._adapters.tidy()
        return set(self._adapters.known)

    @locked
    def adapter_named(self, name: str | None) -> LoRARequest | None:
        """As `XlaBatchEngine.adapter_named`."""
        every = [each.request for each in self._adapters.known.values()]
        if name is None or not every:
            return None
        found = next((each for each in every if each.lora_name == name), None)
        if found is None and name != self._name:
            names = ", ".join((self._name, *(each.lora_name for each in every)))
            raise InvalidRequestError(f"there is no model {name!r}; here are {names}")
        return found

    def identity(self) -> EngineIdentity:
        """That of a single engine of this configuration: which engine a request ran on changes no bit."""
        found, pinned = self._fleet.identity(), self._adapters.pinned
        return replace(found, config={**found.config, "adapters": pinned}) if pinned else found
