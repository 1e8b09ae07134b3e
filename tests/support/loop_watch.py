"""How long an event loop works at one stretch, in processor time of its thread.

Unlike time on the clock, it does not grow when other processes or threads have the processor.
"""

from __future__ import annotations

import asyncio
import threading
import time

TICK_S = 0.001


class LoopWatch:
    """Measures the steps of a loop: what its thread does between two timers that are due all the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._longest = self._before = 0.0
        self._goes_on = True
        self._call(self._begin)

    def longest(self) -> float:
        """The longest step since the last call, in seconds."""
        found: list[float] = []

        def take() -> None:
            self._look()
            found.append(self._longest)
            self._longest = 0.0

        self._call(take)
        return found[0]

    def stop(self) -> None:
        self._goes_on = False

    def _call(self, function: object) -> None:
        """Call a function in the loop's thread, and wait for it."""
        done = threading.Event()

        def call() -> None:
            assert callable(function)
            function()
            done.set()

        self._loop.call_soon_threadsafe(call)
        assert done.wait(600)

    def _begin(self) -> None:
        self._before = time.thread_time()
        self._tick()

    def _tick(self) -> None:
        self._look()
        if self._goes_on:
            self._loop.call_later(TICK_S, self._tick)

    def _look(self) -> None:
        now = time.thread_time()
        self._longest, self._before = max(self._longest, now - self._before), now
