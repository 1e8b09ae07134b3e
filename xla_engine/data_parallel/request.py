"""The parent's state of a request: its parameters, the engine that runs it, and the output so far."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xla_engine.data_parallel.wire import Message, Received
from xla_engine.engine.requests.output_collector import AllSeen, OutputCollector
from xla_engine.errors import ReplayError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

SHORTEST_S = 1e-6  # seconds left of a deadline that has passed


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter on engines.

    request: the caller's LoRARequest. path: absolute path of its directory.
    key: digest of its content; an engine that finds different content rejects the request.
    """

    request: LoRARequest
    path: str
    key: str

    @property
    def number(self) -> int:
        return self.request.lora_int_id

    def told(self) -> Message:
        """The message about it for engines."""
        return {"request": asdict(replace(self.request, lora_path=self.path)), "key": self.key}


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """One live request.

    number: unique number of its latest run; 0 before the first. order: arrival order.
    deadline, queue_deadline: on the parent's clock; infinity without one.
    engine: index of the engine that runs it; None while it waits in the parent. adapter: None for the base model.
    deaths: number of processes that ended while running it. alone: whether it has an engine for itself.
    """

    request_id: str
    order: int
    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    collector: OutputCollector
    arrival: float
    priority: int = 0
    quantum: int | None = None
    salt: str = ""
    adapter: RemoteAdapter | None = None
    deadline: float = math.inf
    queue_deadline: float = math.inf
    number: int = 0
    engine: int | None = None
    deaths: int = 0
    alone: bool = False
    on_refused: Callable[[Exception], object] | None = None
    shown: Received = field(default_factory=Received)
    _coming: Received = field(default_factory=Received)

    @property
    def finished(self) -> bool:
        return self.shown.finished

    @property
    def place(self) -> tuple[int, int]:
        """Sort key in the parent's queue; the lowest goes first."""
        return self.priority, self.order

    @property
    def shares(self) -> str:
        """Requests can share a prefix only if this is equal (salt and adapter)."""
        return self.salt if self.adapter is None else f"{self.salt}/{self.adapter.key}"

    @property
    def expires(self) -> float:
        """When it expires while waiting in the parent."""
        return min(self.deadline, math.inf if self.number else self.queue_deadline)

    def output(self) -> RequestOutput:
        return self.shown.output(self.request_id, self.prompt, self.token_ids, self.arrival)

    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput:
        """See `Readable`."""
        parts = self.shown.new_parts(seen, only_ended=only_ended)
        return self.shown.output(self.request_id, self.prompt, self.token_ids, self.arrival, parts)

    def command(self, number: int, engine: int, now: float) -> Message:
        """Record that it starts on an engine; returns the message for the engine."""
        is_first = not self.number
        self.number, self.engine = number, engine
        self._coming = self.shown if is_first else Received()
        options: dict[str, Any] = {
            "priority": self.priority,
            "quantum": self.quantum,
            "cache_salt": self.salt,
        }
        for name, until in (("deadline_s", self.deadline), ("queue_timeout_s", self.queue_deadline)):
            if until < math.inf and (name == "deadline_s" or is_first):
                options[name] = max(until - now, SHORTEST_S)
        command: Message = {
            "op": "submit",
            "number": number,
            "id": self.request_id,
            "tokens": self.token_ids,
            "params": self.params.to_mapping(),
            "options": options,
            "every_token": self.collector.every_token,
        }
        return command if self.adapter is None else {**command, "adapter": self.adapter.told()}

    def take(self, news: Message) -> bool:
        """Add a message of the latest run. Returns whether it has anything new for the reader.

        A request that runs again first repeats its earlier output. Raises ReplayError if that differs.
        """
        coming = self._coming
        coming.add(news)
        if coming is not self.shown:
            if coming.is_behind(self.shown):
                return False
            if coming.finished and coming.error is not None:
                pass  # the request ends anyway
            elif not coming.continues(self.shown):
                raise ReplayError(f"request {self.request_id!r} got different tokens when it ran again")
            self.shown = coming
        return True

    def end(self, reason: str, error: str | None, now: float) -> None:
        """End the request with the output that its reader has."""
        shown = self.shown
        for index in range(self.params.n):
            sequence = shown.sequences[index]
            sequence.finish = sequence.finish or reason
        shown.finished, shown.error, shown.ended = True, error, now
