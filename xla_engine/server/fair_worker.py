"""Run long calls in one background thread, in fair order between keys."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
        self._busy = False
        for key in list(self._waiting):
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # this key is now last
            self._busy = True
            turn.set()
            return
