"""Finished requests that are kept, so that they can be extended."""

from xla_engine.engine.requests.sequence import LiveSequence, SequenceGroup
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import FinishReason

# After these, a larger `max_tokens` would give no more tokens.
FINAL = frozenset({FinishReason.STOP, FinishReason.ERROR})


# The sequences of a request, in order, with their row settings.
KeptRequest = tuple[tuple[LiveSequence, RowSettings], ...]


class KeptRequests:
    """The latest `most` finished requests that can be extended, by id; the oldest is evicted first.

    Memory: at most `max_model_len` tokens for each sequence, with log-probabilities if they were requested.

    settings: row settings of finished sequences whose request still has others running.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._requests: dict[str, KeptRequest] = {}  # oldest first
        self.settings: dict[str, RowSettings] = {}
        self._forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, sequence: LiveSequence, settings: RowSettings) -> None:
        """Add a sequence that has ended; once all sequences of its request have, keep the request."""
        self.settings[sequence.request_id] = settings
        reader = sequence.reader
        if not reader.finished:
            return
        sequences = reader.parts if isinstance(reader, SequenceGroup) else (sequence,)
        parts = tuple((part, self.settings.pop(part.request_id)) for part in sequences)
        self.put(reader.request_id, parts)

    def put(self, request_id: str, request: KeptRequest) -> None:
        """Keep a request if it can be extended, and evict the oldest beyond `most`."""
        self.forget(request_id)
        self._requests[request_id] = request
        own = {part.request_id for part, _ in request}
        self._forgotten = [name for name in self._forgotten if name not in own]
        if all(part.finish_reason in FINAL for part, _ in request):
            self.forget(request_id)
        while len(self._requests) > self.most:
            self.forget(next(iter(self._requests)))

    def get(self, request_id: str) -> KeptRequest | None:
        """The kept request of this id; None if there is none."""
        return self._requests.get(request_id)

    def take(self, request_id: str) -> None:
        """Remove a request that is being extended."""
        del self._requests[request_id]

    def forget(self, request_id: str) -> None:
        """Remove a request, if it is kept, and note its sequences for `take_forgotten`."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._forgotten += (part.request_id for part, _ in request)

    def clear(self) -> None:
        for name in list(self._requests):
            self.forget(name)

    def every_setting(self) -> list[RowSettings]:
        """The row settings of all kept sequences."""
        parts = (part for request in self._requests.values() for part in request)
        return [*self.settings.values(), *(row for _, row in parts)]

    def take_forgotten(self) -> list[str]:
        """The ids of the sequences forgotten since the last call."""
        names, self._forgotten = self._forgotten, []
        return names
