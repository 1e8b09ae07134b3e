"""The requests of a stream: the caller's id, the engine's, and what was sent of each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sent:
    """A request: the caller's id, and how many tokens and characters of each choice were sent.

    texts: the text of each choice as it was sent, of a request that has ended.
    counted: tokens it had at its latest end.
    """

    name: str
    tokens: dict[int, int] = field(default_factory=dict)
    characters: dict[int, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    counted: int | None = None


class Names:
    """Requests under way, and the latest `keep` that have ended, the oldest of which is forgotten first."""

    def __init__(self, keep: int) -> None:
        self.live: dict[str, Sent] = {}  # by the engine's id
        self._ids: dict[str, str] = {}  # the caller's id -> the engine's
        self._keep = keep
        self._ended: dict[str, tuple[str, Sent]] = {}  # by the caller's id

    def id_of(self, name: str) -> str | None:
        """The engine's id of a request under way."""
        return self._ids.get(name)

    def begin(self, name: str, request_id: str) -> None:
        """A request is under way."""
        self.live[request_id] = Sent(name)
        self._ids[name] = request_id

    def end(self, request_id: str) -> None:
        """A request has ended, and may go on."""
        sent = self.drop(request_id)
        self._ended.pop(sent.name, None)
        self._ended[sent.name] = request_id, sent
        if len(self._ended) > self._keep:
            del self._ended[next(iter(self._ended))]

    def drop(self, request_id: str) -> Sent:
        """A request is over for good."""
        sent = self.live.pop(request_id)
        del self._ids[sent.name]
        return sent

    def ended_id(self, name: str) -> str | None:
        """The engine's id of a request that has ended."""
        found = self._ended.get(name)
        return None if found is None else found[0]

    def go_on(self, name: str) -> None:
        """A request that has ended is under way again."""
        request_id, sent = self._ended.pop(name)
        self.live[request_id] = sent
        self._ids[name] = request_id

    def clear(self) -> None:
        """All requests are over."""
        self.live.clear()
        self._ids.clear()
        self._ended.clear()
