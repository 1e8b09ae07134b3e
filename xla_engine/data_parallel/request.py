"""A request of several engines, in the parent: what it asks for, where it runs, what its reader has of it."""

from __future__ import annotations

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

SHORTEST_S = 1e-6  # what is left of a time that has run out


@dataclass(frozen=True, slots=True)
class RemoteAdapter:
    """An adapter that engines have or load.

    request: as a caller named it. path: of its directory, from the root.
    key: the same for the same content; an engine that finds something else there refuses the request.
    """

    request: LoRARequest
    path: str
    key: str

    @property
    def number(self) -> int:
        return self.request.lora_int_id

    def told(self) -> Message:
        """What engines are told of it."""
        return {"request": asdict(replace(self.request, lora_path=self.path)), "key": self.key}


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """One live request.

    number: of its latest run, never used twice; 0 before the first. order: when it came.
    deadline, queue_deadline: on the parent's clock, infinity without one.
    engine: where it runs, None while it waits in the parent. adapter: None for the model as it is.
    deaths: how many engines have ended with it. alone: whether it is the only one its engine has.
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
        """In the parent's line; the lowest goes first."""
        return self.priority, self.order

    @property
    def shares(self) -> str:
        """What requests have in common that may share a prefix."""
        return self.salt if self.adapter is None else f"{self.salt}/{self.adapter.key}"

    @property
    def expires(self) -> float:
        """When it ends while it waits in the parent."""
        return min(self.deadline, math.inf if self.number else self.queue_deadline)

    def output(self) -> RequestOutput:
        return self.shown.output(self.request_id, self.prompt, self.token_ids, self.arrival)

    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput:
        """See `Readable`."""
        parts = self.shown.new_parts(seen, only_ended=only_ended)
        return self.shown.output(self.request_id, self.prompt, self.token_ids, self.arrival, parts)

    def command(self, number: int, engine: int, now: float) -> Message:
        """Note that it begins on an engine; returns what that is told."""
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
        """Take in news of the latest run; whether the reader has not had them.

        A request that runs again says first what it has said. Raises ReplayError where it says something else.
        """
        coming = self._coming
        coming.add(news)
        if coming is not self.shown:
            if coming.is_behind(self.shown):
                return False
            if coming.finished and coming.error is not None:
                pass  # it ends, whatever it had
            elif not coming.continues(self.shown):
                raise ReplayError(f"request {self.request_id!r} got other tokens when it ran again")
            self.shown = coming
        return True

    def end(self, reason: str, error: str | None, now: float) -> None:
        """End it here, with what its reader has."""
        shown = self.shown
        for index in range(self.params.n):
            shown.add_empty(index)
        for sequence in shown.sequences.values():
            sequence.finish = sequence.finish or reason
        shown.finished, shown.error, shown.ended = True, error, now
