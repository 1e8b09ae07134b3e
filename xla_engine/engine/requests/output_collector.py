"""Where a caller finds the requests that have news for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xla_engine.outputs import RequestOutput


@dataclass(slots=True)
class Seen:
    """How much of a sequence a reader has. ended: it knows the end, too."""

    tokens: int = 0
    characters: int = 0
    ended: bool = False


AllSeen = defaultdict[int, Seen]  # by the sequence's index


class Readable(Protocol):
    """A request as its reader sees it.

    output: as it stands, cumulative.
    news: only the sequences with something that is not in `seen`, and of each only the new part, so that the cost is
        that of the news. `seen` is updated. `cumulative_logprob` and token times are left out. only_ended: leave out
        sequences that still run.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    def output(self) -> RequestOutput: ...
    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput: ...


class OutputCollector:
    """Requests with unread news, each once and in the order in which their news began.

    News merge: however late a reader comes, a request is here once and holds all its tokens. So a slow reader loses
    nothing, delays no other, and costs the engine one entry per request.

    on_news: called when something is put into an empty collector.
    every_token: whether each token is news, else only an end is. May be changed at any time.
    """

    def __init__(self, on_news: Callable[[], None] | None = None, *, every_token: bool = True) -> None:
        self.every_token = every_token
        self._requests: dict[Readable, None] = {}  # by identity: an id may come again before it was read
        self._on_news = on_news

    def __bool__(self) -> bool:
        return bool(self._requests)

    def put(self, request: Readable) -> None:
        """A request has news."""
        was_empty = not self._requests
        self._requests[request] = None
        if was_empty and self._on_news is not None:
            self._on_news()

    def take(self) -> list[Readable]:
        """All requests with news, which are read now."""
        taken, self._requests = self._requests, {}
        return list(taken)
