"""The requests of a stream by their names, and its control lines, with the events that answer these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from xla_engine.batch.submit import whole_request
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.openai.fields import SUBMIT_FIELDS
from xla_engine.scheduler import Row, VerifyRow
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

if TYPE_CHECKING:
    from xla_engine.open_engine import EngineClient

OPS = ("submit", "cancel", "list", "extend", "peek", "stats", "step", "drain")


@dataclass(slots=True)
class SentRequest:
    """A request: the caller's id and the engine's, and the numbers of tokens and characters sent of each choice.

    texts: for a request that has ended, the text of each choice as sent.
    counted: the number of tokens when it last ended.
    """

    name: str
    request_id: str
    tokens: dict[int, int] = field(default_factory=dict)
    characters: dict[int, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    counted: int | None = None


class Names:
    """Live requests, and the `keep` most recent ones that have ended.

    live: by the engine's id. named: the same by the caller's id. ended: by the caller's id; they can be extended.
    """

    def __init__(self, keep: int) -> None:
        self.live: dict[str, SentRequest] = {}
        self.named: dict[str, SentRequest] = {}
        self.ended: dict[str, SentRequest] = {}
        self._keep = keep

    def begin(self, sent: SentRequest) -> None:
        """Register a live request."""
        self.live[sent.request_id] = self.named[sent.name] = sent

    def end(self, request_id: str) -> None:
        """Mark a request as ended."""
        sent = self.drop(request_id)
        self.ended.pop(sent.name, None)
        self.ended[sent.name] = sent
        if len(self.ended) > self._keep:
            del self.ended[next(iter(self.ended))]

    def drop(self, request_id: str) -> SentRequest:
        """Forget a live request."""
        sent = self.live.pop(request_id)
        del self.named[sent.name]
        return sent

    def clear(self) -> None:
        """Forget all requests."""
        for requests in (self.live, self.named, self.ended):
            requests.clear()


class Controls:
    """Executes control lines. put: takes the events."""

    def __init__(self, engine: EngineClient, names: Names, put: Callable[[Mapping[str, Any]], None]) -> None:
        self._engine = engine
        self._names = names
        self._put = put
        self._turns_left = 0.0  # turns until the next line is read
        self._answer: dict[str, Any] | None = None  # event to send then

    @property
    def holds(self) -> bool:
        """Whether reading of lines is paused by an unfinished `step` or `drain`."""
        return self._answer is not None

    def turn(self) -> None:
        """Count a finished turn of the engine."""
        self._turns_left -= 1
        if self._answer is not None and "turns" in self._answer:
            self._answer["turns"] += 1

    def settle(self) -> None:
        """Answer a finished `step` or `drain`."""
        if self._answer is not None and (self._turns_left <= 0 or not self._names.live):
            answer, self._answer = self._answer, None
            self._put(answer)

    def obey(self, op: object, record: dict[str, Any]) -> None:
        """Execute a line. record: its other fields. Raises InvalidRequestError and QueueFullError."""
        match op:
            case "cancel":
                self._cancel(record)
            case "list":
                self._list(record)
            case "extend":
                self._extend(record)
            case "peek":
                self._peek(record)
            case "stats":
                self._check_empty(op, record)
                self._put({"event": "stats", **asdict(self._engine.stats())})
            case "step":
                self._step(record)
            case "drain":
                self._check_empty(op, record)
                self._turns_left, self._answer = math.inf, {"event": "drain"}
            case _:
                known = ", ".join(f'"{each}"' for each in OPS)
                raise InvalidRequestError(f"op must be one of {known}, not {shown(op)}")

    def _cancel(self, record: Mapping[str, Any]) -> None:
        name = self._name(record, 'write {"op": "cancel", "id": ID}', others=())
        sent = self._names.named.get(name)
        # Its finish event comes with the next turn.
        found = sent is not None and self._engine.abort(sent.request_id)
        self._put({"event": "cancel", "id": name, "found": found})

    def _list(self, record: Mapping[str, Any]) -> None:
        self._check_empty("list", record)
        snapshot = self._engine.snapshot()
        views = [
            *((view, None) for view in snapshot.draining),
            *((slot.request, slot.slot) for slot in snapshot.slots if slot.request is not None),
            *((view, None) for view in snapshot.waiting),
        ]
        requests = [
            {
                "id": self._own_name(view.request_id),
                "status": str(view.status),
                "slot": None if slot is None else slot.index,
                "epoch": None if slot is None else slot.epoch,
                "prompt_tokens": view.prompt_tokens,
                "max_tokens": view.max_tokens,
                "generated": view.credited,
                "remaining": view.max_tokens - view.credited,
                "quantum": view.quantum_left,
                "reason": None if view.decision is None else view.decision.reason,
            }
            for view, slot in views
        ]
        self._put({"event": "list", "requests": requests})

    def _peek(self, record: Mapping[str, Any]) -> None:
        self._check_empty("peek", record)
        try:
            found = self._engine.peek()
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        plan, own = found.plan, self._own_name
        rows: tuple[Row | VerifyRow, ...] = (*plan.decode, *plan.verify)
        self._put(
            {
                "event": "peek",
                "admitted": [own(name) for name in plan.admitted],
                "prefill": [{"id": own(part.request_id), "tokens": len(part.tokens)} for part in plan.chunks],
                "decode": [own(row.request_id) for row in rows],
                "waiting": [{"id": own(name), "reason": why} for name, why in found.why_not.items()],
                "expired": [own(name) for name, _ in found.expired],
            }
        )

    def _own_name(self, request_id: str) -> str | None:
        """The caller's id of a sequence's request."""
        sent = self._names.live.get(whole_request(request_id))
        return None if sent is None else sent.name

    def _extend(self, record: Mapping[str, Any]) -> None:
        usage = (
            f'write {{"op": "extend", "id": ID, "max_tokens": N}}, perhaps with {", ".join(SUBMIT_FIELDS)}'
        )
        name = self._name(record, usage, others=("max_tokens", *SUBMIT_FIELDS))
        options = {field: value for field, value in record.items() if field in SUBMIT_FIELDS}
        if name in self._names.named:
            raise InvalidRequestError(f"{name!r} is still running: extend it when it has ended")
        if (sent := self._names.ended.get(name)) is None:
            raise InvalidRequestError(
                f"no request {name!r} has ended, or it was dropped: see --keep-finished"
            )
        self._engine.extend(sent.request_id, record.get("max_tokens"), **options)  # type: ignore[arg-type]
        self._names.begin(self._names.ended.pop(name))
        self._put({"event": "extend", "id": name})

    def _step(self, record: dict[str, Any]) -> None:
        turns = integer_of(record.pop("turns", 1))
        if record or turns is None or turns < 1:
            raise InvalidRequestError('write {"op": "step"} or {"op": "step", "turns": N}')
        self._turns_left, self._answer = turns, {"event": "step", "turns": 0}

    def _name(self, record: Mapping[str, Any], usage: str, *, others: tuple[str, ...]) -> str:
        """The `id` of a line that has no other fields than `others`. Raises InvalidRequestError."""
        name = record.get("id", record.get("custom_id"))
        given = record.keys() - set(others)
        if not isinstance(name, str) or len(given) != 1 or not given <= {"id", "custom_id"}:
            raise InvalidRequestError(usage)
        return name

    def _check_empty(self, op: str, record: Mapping[str, Any]) -> None:
        if record:
            raise InvalidRequestError(f'write {{"op": "{op}"}}')
