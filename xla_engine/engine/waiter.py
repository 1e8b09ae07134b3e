"""Waits for steps of the device in a background thread, which is abandoned if a step hangs."""

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from xla_engine.errors import DeviceLostError, EngineClosedError
from xla_engine.utils.call_thread import CallThread, Pending

T = TypeVar("T")


def device_lost() -> DeviceLostError:
    """The error that takes the place of a step's result when the step times out."""
    return DeviceLostError("the device has not answered within step_timeout_s; start a new process")


class Waiter:
    """A thread that makes calls in order; most of them wait for a step.

    sleep: waits for an event for at most the given seconds; returns whether it was set.
    wake: set when a watched call is done, and when a deadline is added or passes.
    """

    def __init__(self) -> None:
        self.sleep: Callable[[threading.Event, float], bool] = threading.Event.wait
        self.wake = threading.Event()
        self._thread = CallThread()
        self._pid = os.getpid()
        self.close = self._thread.close

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

    def run(self, call: Callable[[], T], time_left: Callable[[], float]) -> T:
        """Make a call in the thread and return its result. Raises its error, or DeviceLostError when time is up."""
        answer = self.watch(self.ask_and_wake(call), time_left, lambda: False)
        if isinstance(answer, BaseException):
            raise answer
        assert answer is not None, "only `expire` makes it return early"
        return answer

    def ask_and_wake(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call for the thread; wait for it with `watch`."""
        return self._thread.ask(call, self.wake.set)

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
