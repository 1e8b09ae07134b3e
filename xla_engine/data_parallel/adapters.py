"""The adapters of several engines: which engine has which adapter, and which adapter is evicted for another.

The parent decides, from what it has told each engine: it evicts the least recently used adapter that no request of
the engine uses. An engine never has more requests than the parent knows of, so the eviction is always possible.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.data_parallel.fleet import Member
from xla_engine.data_parallel.request import RemoteAdapter, RemoteRequest
from xla_engine.errors import AdaptersBusyError, CheckpointError, InvalidRequestError
from xla_engine.model_loader.describe import ModelDescription
from xla_engine.model_loader.peft.adapter import read_adapter
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.runner.adapters import lora_form

Key = Callable[[LoRARequest], str]


def key_reader(model: ModelDescription, config: EngineConfig) -> Key:
    """Returns a function that reads an adapter and returns its key, or raises InvalidRequestError as an engine
    does."""
    if not config.enable_lora:
        return _without_room
    form = lora_form(config, model.config, np.dtype(np.float32), None)
    assert form is not None

    def read(request: LoRARequest) -> str:
        try:
            return read_adapter(request.lora_path, model.sources, model.config, form).fingerprint
        except CheckpointError as error:
            raise InvalidRequestError(f"adapter {request.lora_name!r}: {error}") from error

    return read


def _without_room(request: LoRARequest) -> str:
    raise InvalidRequestError("lora_request needs an engine that was started with enable_lora=True")


class FleetAdapters:
    """Adapters by id.

    known: adapters that an engine has or a live request uses, and until `tidy` also unused ones. Each id is one
    adapter.
    """

    def __init__(
        self, key: Key, room: int, members: Sequence[Member], live: Callable[[], Iterable[RemoteRequest]]
    ) -> None:
        """key: see `key_reader`. room: adapter slots of each engine (`max_loras`). live: returns the live
        requests."""
        self._key, self._room, self._members, self._live = key, room, members, live
        self._pinned: set[int] = set()
        self.known: dict[int, RemoteAdapter] = {}

    def tidy(self) -> None:
        """Forget adapters that no engine has and no live request uses."""
        held = {number for member in self._members for number in member.adapters} | self._asked_for()
        self.known = {number: each for number, each in self.known.items() if number in held}

    @property
    def pinned(self) -> dict[str, str]:
        found = [self.known[number] for number in sorted(self._pinned & self.known.keys())]
        return {each.request.lora_name: each.key for each in found}

    def of(self, request: LoRARequest) -> RemoteAdapter:
        """Look up or register a request's adapter. Raises InvalidRequestError as `Adapters.of` does.

        Does not load it. If all slots are used by requests, the request will wait. Raises AdaptersBusyError if all
        slots are pinned.
        """
        number = request.lora_int_id
        found = self.known.get(number)
        if found is not None and found.request != request:
            self.tidy()
            found = self.known.get(number)
        if found is None:
            key = self._key(request)
            if len(self._pinned) >= self._room:
                raise AdaptersBusyError(
                    f"{self._room} adapters are loaded (max_loras) and pinned: start the engines with a larger "
                    f"max_loras"
                )
            path = str(Path(request.lora_path).expanduser().absolute())
            found = self.known[number] = RemoteAdapter(request, path, key)
        if found.request != request:
            raise InvalidRequestError(
                f"lora_int_id {number} is {found.request}; give {request.lora_name!r} another id, or remove that one "
                "first"
            )
        return found

    def named(self, name: str | None, model: str) -> LoRARequest | None:
        """The adapter with this name; None for the base model. Raises InvalidRequestError."""
        every = [each.request for each in self.known.values()]
        if name is None or not every:
            return None
        found = next((each for each in every if each.lora_name == name), None)
        if found is None and name != model:
            names = ", ".join((model, *(each.lora_name for each in every)))
            raise InvalidRequestError(f"there is no model {name!r}; here are {names}")
        return found

    def engines_for(
        self, adapter: RemoteAdapter, loads: Mapping[int, int], slack: int
    ) -> tuple[dict[int, int], set[int]]:
        """The loads of engines that can take a request with this adapter, and the set of those that have it.

        loads: number of requests by engine. slack: how many more requests an engine that has the adapter or a free
        slot may have than one that would have to evict an adapter.
        """
        number = adapter.number
        takes = {index: load for index, load in loads.items() if self._takes(self._members[index], number)}
        having = {index for index in takes if number in self._members[index].adapters}
        roomy = {
            index for index in takes if index in having or len(self._members[index].adapters) < self._room
        }
        most = min(takes.values(), default=0) + slack
        near = {index: takes[index] for index in takes if index in roomy and takes[index] <= most}
        return near or takes, having

    def make_room(self, member: Member, adapter: RemoteAdapter) -> None:
        """Reserve a slot for this adapter on an engine, evicting another if needed."""
        number = adapter.number
        if number in member.adapters:
            member.adapters.remove(number)
        elif len(member.adapters) >= self._room:
            gone = self._idle(member)[0]
            self._unload(member, gone)
            if not any(gone in each.adapters for each in self._members) and gone not in self._asked_for():
                del self.known[gone]
        member.adapters.append(number)

    def load(self, adapter: RemoteAdapter) -> bool:
        """Load an adapter on every engine. Returns false if all had it.

        Raises AdaptersBusyError, and changes nothing, if an engine has no room for it.
        """
        there = [member for member in self._members if member.process is not None]
        lacking = [member for member in there if adapter.number not in member.adapters]
        if not all(self._takes(member, adapter.number) for member in lacking):
            raise AdaptersBusyError(
                f"{self._room} adapters are loaded (max_loras), and all are pinned or have requests: start the "
                f"engines with a larger max_loras, or call again when those requests have ended"
            )
        for member in lacking:
            self.make_room(member, adapter)
            member.tell({"op": "load", "adapter": adapter.told()})
        return bool(lacking)

    def load_again(self, member: Member) -> None:
        """Load the adapters of an engine again after its process was restarted."""
        for number in member.adapters:
            member.tell({"op": "load", "adapter": self.known[number].told()})

    def pin(self, number: int) -> bool:
        """Load an adapter on every engine and keep it until it is removed. Returns false if it is unknown.

        Raises AdaptersBusyError if an engine has no room for it, or if no room would be left for the adapters of
        live requests.
        """
        self.tidy()
        if number not in self.known:
            return False
        pinned = self._pinned | {number}
        if len(pinned) >= self._room and not self._asked_for() <= pinned:
            raise AdaptersBusyError(
                f"with {len(pinned)} pinned adapters (max_loras) there is no room for the adapters of running and "
                f"waiting requests: pin it when they have ended, or start the engines with a larger max_loras"
            )
        self.load(self.known[number])
        self._pinned = pinned
        return True

    def remove(self, number: int) -> bool:
        """Unload an adapter everywhere. Returns false if it is unknown. Raises InvalidRequestError if live requests
        use it."""
        self.tidy()
        if number not in self.known:
            return False
        if number in self._asked_for():
            raise InvalidRequestError(
                f"adapter {number} has running or waiting requests; abort them, or wait until they end"
            )
        for member in self._members:
            if number in member.adapters:
                self._unload(member, number)
        self._pinned.discard(number)
        del self.known[number]
        return True

    def _takes(self, member: Member, number: int) -> bool:
        """Whether an engine has the adapter, or can load it."""
        return number in member.adapters or len(member.adapters) < self._room or bool(self._idle(member))

    def _idle(self, member: Member) -> list[int]:
        """The evictable adapters of an engine, least recently used first."""
        busy = _adapters_of(member.live.values()) | self._pinned
        return [number for number in member.adapters if number not in busy]

    def _asked_for(self) -> set[int]:
        return _adapters_of(self._live())

    def _unload(self, member: Member, number: int) -> None:
        member.tell({"op": "unload", "adapter": number})
        member.adapters.remove(number)


def _adapters_of(requests: Iterable[RemoteRequest]) -> set[int]:
    return {request.adapter.number for request in requests if request.adapter is not None}
