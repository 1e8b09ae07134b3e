"""A thread that makes calls in the background, and can be abandoned if one hangs."""

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A call that another thread makes. answer: its result or exception, once `done` is set."""

    def __init__(self, call: Callable[[], T], on_done: Callable[[], object] | None) -> None:
        self.done = threading.Event()
        self.answer: T | BaseException | None = None
        self._call = call
        self._on_done = on_done

    def run(self) -> None:
        """Make the call, then call `on_done`."""
        try:
            self.answer = self._call()
        except BaseException as error:
            self.answer = error
        self.done.set()
        if self._on_done is not None:
            with suppress(RuntimeError):  # the event loop may have been closed meanwhile
                self._on_done()

    def result(self) -> T | BaseException:
        """The answer; `done` must be set."""
        assert self.answer is not None, "the call was abandoned"
        return self.answer


class CallThread:
    """A daemon thread that makes calls in order; it starts with the first.

    close: lets it end after the calls so far.
    """

    def __init__(self, name: str = "xla-engine-wait") -> None:
        self._jobs: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        # Also runs when this object is garbage-collected.
        self.close = weakref.finalize(self, self._jobs.put, None)

    def ask(self, call: Callable[[], T], on_done: Callable[[], object] | None = None) -> Pending[T]:
        """Queue a call for the thread. on_done: called in that thread afterwards."""
        if self._thread.ident is None:
            self._thread.start()
        pending = Pending(call, on_done)
        self._jobs.put(pending)
        return pending

    @property
    def num_waiting(self) -> int:
        """Calls that have not begun."""
        return self._jobs.qsize()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, which takes a `close`, for at most so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)


def _serve(jobs: queue.SimpleQueue[Pending[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # otherwise it would stay alive until the next job
