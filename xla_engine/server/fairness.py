"""Fairness between keys: one background thread in turns, and limits on what the requests of each hold."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from xla_engine.server.errors import busy

T = TypeVar("T")


class FairWorker:
    """A thread for calls of many keys. Keys take turns; the calls of a key keep their order."""

    def __init__(self, name: str) -> None:
        """name: of the thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str, deque[asyncio.Event]] = {}  # by key; the key whose turn it is comes first
        self._busy = False

    async def run(self, call: Callable[[], T], key: str) -> T:
        """Run the call in its key's turn, and return or raise what it does.

        A caller that is cancelled before its turn leaves the queue. A call that has begun runs to its end.
        """
        turn = asyncio.Event()
        turns = self._waiting.setdefault(key, deque())
        turns.append(turn)
        if not self._busy:
            self._next()
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if turn.is_set():
                self._next()
            else:
                turns.remove(turn)
                if not turns:
                    self._waiting.pop(key, None)
            raise
        work = self._thread.submit(call)
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._next)

        work.add_done_callback(done)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Stop running calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        """Start the next call."""
        self._busy = bool(self._waiting)
        if self._busy:
            key = next(iter(self._waiting))
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # this key is now last
            turn.set()


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
            raise busy(self._refusal, code=self._code)
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
