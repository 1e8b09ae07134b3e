"""Background calls: a thread that waits for steps of the device, and can be abandoned if a step hangs."""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from xla_engine.errors import DeviceLostError, EngineClosedError

T = TypeVar("T")


def device_lost() -> DeviceLostError:
    """The error that takes the place of a step's result when the step times out."""
    return DeviceLostError("the device has not answered within step_timeout_s; start a new process")


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


class Waiter:
    """A daemon thread that makes calls in order; most of them wait for a step.

    sleep: waits for an event for at most the given seconds; returns whether it was set.
    wake: set when a watched call is done, and when a deadline is added or passes.
    """

    def __init__(self) -> None:
        self.sleep: Callable[[threading.Event, float], bool] = threading.Event.wait
        self.wake = threading.Event()
        self._jobs: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._started = False
        self._pid = os.getpid()
        # Also runs when the engine is garbage-collected.
        self.close = weakref.finalize(self, self._jobs.put, None)

    @property
    def is_at_home(self) -> bool:
        """Whether this process made the engine; a forked process does not have its threads."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise EngineClosedError in a process that was forked from the engine's."""
        if not self.is_at_home:
            raise EngineClosedError(
                f"the engine belongs to process {self._pid}, and this one was forked from it; make an engine in this "
                "process, or start it with the method spawn"
            )

    def ask(self, call: Callable[[], T], on_done: Callable[[], object] | None = None) -> Pending[T]:
        """Queue a call for the thread. on_done: called in that thread afterwards."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._jobs,), name="xla-engine-wait", daemon=True).start()
            self._started = True
        pending = Pending(call, on_done)
        self._jobs.put(pending)
        return pending

    def ask_and_wake(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call for the thread; wait for it with `watch`."""
        return self.ask(call, self.wake.set)

    def watch(
        self, pending: Pending[T], time_left: Callable[[], float], expire: Callable[[], bool]
    ) -> T | BaseException | None:
        """Wait for a call of `ask_and_wake` until `time_left` is 0, and call `expire` at every deadline.

        Returns the call's result or exception, or DeviceLostError when time is up. Returns None while the call still
        runs if `expire` returns true, which means that a request has ended and the caller should return its output.
        """
        while True:
            self.wake.clear()
            if pending.done.is_set():
                return pending.result()
            if expire():
                return None
            if (left := time_left()) <= 0:
                return device_lost()
            self.sleep(self.wake, min(left, threading.TIMEOUT_MAX))


def _serve(jobs: queue.SimpleQueue[Pending[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # otherwise it would stay alive until the next job
