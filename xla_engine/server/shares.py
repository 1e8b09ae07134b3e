"""A limit on a resource that all requests share. No key may hold more than half of it."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from xla_engine.server.errors import ApiError


class Shares:
    """Counts how much of a resource the requests of each key hold."""

    def __init__(self, most: int, refusal: str, *, code: str = "queue_full") -> None:
        """most: limit over all keys. refusal, code: message and code of the error beyond it."""
        self._most = most
        self._refusal = refusal
        self._code = code
        self._held: Counter[str] = Counter()  # by key

    @property
    def held(self) -> int:
        """The amount held by all keys."""
        return self._held.total()

    def take(self, amount: int, key: str) -> None:
        """Hold `amount` more, until `give_back`. Raises ApiError with status 429 if that exceeds a limit."""
        if amount and (self.held + amount > self._most or self._held[key] + amount > self._most // 2):
            raise ApiError(429, self._refusal, code=self._code, headers={"retry-after": "1"})
        self._held[key] += amount

    def give_back(self, amount: int, key: str) -> None:
        """Release `amount`."""
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]

    @contextlib.contextmanager
    def hold(self, amount: int, key: str) -> Iterator[None]:
        """Hold `amount` within the context. Raises ApiError as `take` does."""
        self.take(amount, key)
        try:
            yield
        finally:
            self.give_back(amount, key)
