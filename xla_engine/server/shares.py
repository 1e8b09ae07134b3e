"""What requests may hold together, of which no key may have more than half."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from xla_engine.server.errors import ApiError


class Shares:
    """An amount of something that requests of many keys hold for a while."""

    def __init__(self, most: int, refusal: str, *, code: str = "queue_full") -> None:
        """most: that all may hold together. refusal, code: of the error of a request that is one too many."""
        self._most = most
        self._refusal = refusal
        self._code = code
        self._held: Counter[str] = Counter()  # by key

    @property
    def held(self) -> int:
        """What all hold now."""
        return self._held.total()

    def take(self, amount: int, key: str) -> None:
        """Hold this much more, until `give_back`. Raises ApiError with status 429, and holds nothing then."""
        if amount and (self.held + amount > self._most or self._held[key] + amount > self._most // 2):
            raise ApiError(429, self._refusal, code=self._code, headers={"retry-after": "1"})
        self._held[key] += amount

    def give_back(self, amount: int, key: str) -> None:
        """End holding this much."""
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]

    @contextlib.contextmanager
    def hold(self, amount: int, key: str) -> Iterator[None]:
        """Hold this much within. Raises ApiError as `take` does."""
        self.take(amount, key)
        try:
            yield
        finally:
            self.give_back(amount, key)
