"""Collects the requests that have new output for a caller."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xla_engine.outputs import RequestOutput


@dataclass(slots=True)
class Seen:
    """How much of a sequence a reader has seen. ended: it has seen the end."""

    tokens: int = 0
    characters: int = 0
    ended: bool = False


AllSeen = defaultdict[int, Seen]  # by sequence index


class Readable(Protocol):
    """A request as its reader sees it.

    output: the cumulative output so far.
    news: only what is not in `seen`, which is updated: the new parts of sequences that have any. The cost is
        proportional to the new tokens. `cumulative_logprob` and token times are omitted. only_ended: omit running
        sequences.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    def output(self) -> RequestOutput: ...
    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput: ...


class OutputCollector:
    """The requests with unread output, each once, in order of their first unread output.

    New output merges with unread output. A slow reader therefore loses nothing, delays no other, and costs the engine
    one entry per request.

    on_news: called when a request is put into an empty collector.
    every_token: whether each token counts as news; otherwise only the end does. May be changed at any time.
    """

    def __init__(self, on_news: Callable[[], None] | None = None, *, every_token: bool = True) -> None:
        self.every_token = every_token
        self._requests: dict[
            Readable, None
        ] = {}  # by identity, because an id may be reused before it was read
        self._on_news = on_news

    def __bool__(self) -> bool:
        return bool(self._requests)

    def put(self, request: Readable) -> None:
        """Add a request that has new output."""
        was_empty = not self._requests
        self._requests[request] = None
        if was_empty and self._on_news is not None:
            self._on_news()

    def take(self) -> list[Readable]:
        """Remove and return all requests with unread output."""
        taken, self._requests = self._requests, {}
        return list(taken)
