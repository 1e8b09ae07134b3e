"""Requests that have ended and may go on."""

from __future__ import annotations

from typing import NamedTuple

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.requests.sequence_group import SequenceGroup
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import FinishReason

FINAL = frozenset(
    {FinishReason.STOP, FinishReason.ERROR}
)  # ends after which a longer request has no more tokens


class KeptRequest(NamedTuple):
    """The sequences of a request, in order, with what the device was told about them."""

    parts: tuple[tuple[LiveSequence, RowSettings], ...]

    @property
    def goes_on(self) -> bool:
        """Whether any of them may go on."""
        return any(part.finish_reason not in FINAL for part, _ in self.parts)


class KeptRequests:
    """The latest `most` requests that have ended and may go on, by id; the one that ended first is forgotten first.

    Each is bounded by `max_model_len` tokens for every sequence, with their log-probabilities where they were asked
    for.

    settings: of sequences that ended before others of their request.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._requests: dict[str, KeptRequest] = {}  # first ended first
        self.settings: dict[str, RowSettings] = {}
        self._forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, sequence: LiveSequence, settings: RowSettings) -> None:
        """A sequence has ended; its request is kept when all of its sequences have."""
        self.settings[sequence.request_id] = settings
        reader = sequence.reader
        if not reader.finished:
            return
        sequences = reader.parts if isinstance(reader, SequenceGroup) else (sequence,)
        parts = tuple((part, self.settings.pop(part.request_id)) for part in sequences)
        self.put(reader.request_id, KeptRequest(parts))

    def put(self, request_id: str, request: KeptRequest) -> None:
        """Keep a request, if it may go on; the oldest make room."""
        self.forget(request_id)
        self._requests[request_id] = request
        own = {part.request_id for part, _ in request.parts}
        self._forgotten = [name for name in self._forgotten if name not in own]
        if not request.goes_on:
            self.forget(request_id)
        while len(self._requests) > self.most:
            self.forget(next(iter(self._requests)))

    def get(self, request_id: str) -> KeptRequest | None:
        """A request that is kept; None where there is none of this id."""
        return self._requests.get(request_id)

    def take(self, request_id: str) -> None:
        """A request goes on."""
        del self._requests[request_id]

    def forget(self, request_id: str) -> None:
        """Let go of a request, if it is here."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._forgotten += (part.request_id for part, _ in request.parts)

    def clear(self) -> None:
        """Let go of all."""
        for name in list(self._requests):
            self.forget(name)

    def every_setting(self) -> list[RowSettings]:
        """What the device was told of all sequences that are kept."""
        parts = (part for request in self._requests.values() for part in request.parts)
        return [*self.settings.values(), *(row for _, row in parts)]

    def take_forgotten(self) -> list[str]:
        """The sequences that were let go of since the last call."""
        names, self._forgotten = self._forgotten, []
        return names
