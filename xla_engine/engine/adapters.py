"""The adapters that an engine has loaded: their slots on the device, and their eviction."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from xla_engine.errors import AdaptersBusyError, CheckpointError, InvalidRequestError
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.model_loader.peft.adapter import read_adapter
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.runner.encoder_runner import EncoderRunner
from xla_engine.runner.runner import Runner


class LoadedAdapter(NamedTuple):
    """slot: index on the device, from 1; 0 is the model without an adapter. key: a hash of the adapter's content."""

    slot: int
    key: str
    request: LoRARequest | None


NO_ADAPTER = LoadedAdapter(0, "", None)


class Adapters:
    """Adapters by id, loaded when a request first needs one.

    If all slots are taken, the least recently used adapter that no request uses and that is not pinned is evicted.
    """

    def __init__(
        self,
        runner: Runner | EncoderRunner,
        checkpoint: Checkpoint,
        slots_in_use: Callable[[], Collection[int]],
    ) -> None:
        """slots_in_use: returns the slots of requests that run or may still run."""
        self._runner = runner
        self._checkpoint = checkpoint
        self._slots_in_use = slots_in_use
        self._loaded: dict[int, LoadedAdapter] = {}  # least recently used first
        self._pinned: set[int] = set()

    @property
    def ids(self) -> set[int]:
        return set(self._loaded)

    def add(self, request: LoRARequest) -> bool:
        """As `XlaBatchEngine.add_lora`."""
        known = request.lora_int_id in self._loaded
        self.of(request)
        return not known

    def of(self, request: LoRARequest | None) -> LoadedAdapter:
        """The adapter of a request, loaded if necessary.

        Raises InvalidRequestError; its subclass AdaptersBusyError if every slot's adapter is pinned or in use.
        """
        if request is None:
            return NO_ADAPTER
        found = self._loaded.pop(request.lora_int_id, None)
        if found is None:
            found = self._load(request)
        self._loaded[request.lora_int_id] = found
        if found.request != request:
            raise InvalidRequestError(
                f"lora_int_id {request.lora_int_id} is {found.request}; give {request.lora_name!r} another id, or "
                "remove that one first"
            )
        return found

    def in_slot(self, slot: int) -> LoRARequest | None:
        """The adapter in a slot; None if the slot is free."""
        return next((each.request for each in self._loaded.values() if each.slot == slot), None)

    def named(self, name: str | None) -> LoRARequest | None:
        """As `XlaBatchEngine.adapter_named`."""
        if name is None or not self._loaded:
            return None
        loaded = [each.request for each in self._loaded.values() if each.request is not None]
        found = next((request for request in loaded if request.lora_name == name), None)
        if found is None and name != (own := self._checkpoint.path.name):
            names = ", ".join((own, *(request.lora_name for request in loaded)))
            raise InvalidRequestError(f"no model {name!r}; here are {names}")
        return found

    @property
    def pinned(self) -> dict[str, str]:
        found = ((number, each) for number, each in self._loaded.items() if number in self._pinned)
        return {each.request.lora_name: each.key for _, each in sorted(found) if each.request is not None}

    def pin(self, lora_int_id: int) -> bool:
        """Protect an adapter from eviction; False if it is not loaded."""
        if lora_int_id in self._loaded:
            self._pinned.add(lora_int_id)
        return lora_int_id in self._loaded

    def remove(self, lora_int_id: int) -> bool:
        """Unload an adapter; False if it is not loaded. Raises InvalidRequestError while requests use it."""
        found = self._loaded.get(lora_int_id)
        if found is None:
            return False
        if found.slot in self._slots_in_use():
            raise InvalidRequestError(
                f"adapter {lora_int_id} has running, waiting or kept requests; abort them, or wait until they end"
            )
        self._pinned.discard(lora_int_id)
        del self._loaded[lora_int_id]
        return True

    def _load(self, request: LoRARequest) -> LoadedAdapter:
        form = self._runner.spec.lora
        if form is None:
            raise InvalidRequestError("lora_request needs an engine that was started with enable_lora=True")
        if not self._checkpoint.sources:
            raise InvalidRequestError(
                "adapters need a model that was loaded from files, because they refer to weights by name"
            )
        try:
            adapter = read_adapter(request.lora_path, self._checkpoint.sources, self._checkpoint.config, form)
        except CheckpointError as error:
            raise InvalidRequestError(f"adapter {request.lora_name!r}: {error}") from error
        slot = self._free_slot(form.slots)
        self._runner.weights.write_adapter(slot, adapter.leaves)
        return LoadedAdapter(slot, adapter.fingerprint, request)

    def _free_slot(self, slots: int) -> int:
        taken = {each.slot for each in self._loaded.values()}
        if free := set(range(1, slots + 1)) - taken:
            return min(free)
        busy = self._slots_in_use()
        for number, each in self._loaded.items():
            if number not in self._pinned and each.slot not in busy:
                del self._loaded[number]
                return each.slot
        raise AdaptersBusyError(
            f"{slots} adapters are loaded (max_loras), and all are pinned or have requests: start the engine with a "
            f"larger max_loras, or submit when those requests have ended"
        )
