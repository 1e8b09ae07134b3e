"""The requests of a stream: the caller's id, the engine's id, and how much of each was sent."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """A request: the caller's id, and the numbers of tokens and characters sent of each choice.

    texts: for a request that has ended, the text of each choice as sent.
    counted: the number of tokens when it last ended.
    """

    name: str
    tokens: dict[int, int] = field(default_factory=dict)
    characters: dict[int, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    counted: int | None = None


class Names:
    """Live requests, and the `keep` most recent ones that have ended."""

    def __init__(self, keep: int) -> None:
        self.live: dict[str, Sent] = {}  # by the engine's id
        self._ids: dict[str, str] = {}  # the caller's id -> the engine's
        self._keep = keep
        self._ended: dict[str, tuple[str, Sent]] = {}  # by the caller's id

    def id_of(self, name: str) -> str | None:
        """The engine's id of a live request."""
        return self._ids.get(name)

    def begin(self, name: str, request_id: str) -> None:
        """Register a live request."""
        self.live[request_id] = Sent(name)
        self._ids[name] = request_id

    def end(self, request_id: str) -> None:
        """Mark a request as ended; it can still be extended."""
        sent = self.drop(request_id)
        self._ended.pop(sent.name, None)
        self._ended[sent.name] = request_id, sent
        if len(self._ended) > self._keep:
            del self._ended[next(iter(self._ended))]

    def drop(self, request_id: str) -> Sent:
        """Forget a request."""
        sent = self.live.pop(request_id)
        del self._ids[sent.name]
        return sent

    def ended_id(self, name: str) -> str | None:
        """The engine's id of a request that has ended."""
        found = self._ended.get(name)
        return None if found is None else found[0]

    def go_on(self, name: str) -> None:
        """Mark an ended request as live again."""
        request_id, sent = self._ended.pop(name)
        self.live[request_id] = sent
        self._ids[name] = request_id

    def clear(self) -> None:
        """Forget all live requests."""
        self.live.clear()
        self._ids.clear()
        self._ended.clear()
