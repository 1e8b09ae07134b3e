"""Show an engine's start on one line, which disappears when it is ready."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from xla_engine.utils.progress import new_bar

REDRAW_SECONDS = 0.25


class StartupStep(NamedTuple):
    """A part of the start and its progress: bytes of weights, programs, or 0 of 1."""

    doing: str
    done: int = 0
    total: int = 1


StartupProgress = Callable[[StartupStep], None]


def silent(step: StartupStep) -> None:
    """Show nothing."""


class StartTimes:
    """Measures the seconds of each part of a start, by its name in the start-up line.

    began: start of the process on the clock.
    """

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.parts: dict[str, float] = {}
        self._since, self._doing, self._clock = began, "imports and model files", clock

    def following(self, progress: StartupProgress) -> StartupProgress:
        """A progress callback that measures times and calls `progress`."""

        def step(step: StartupStep) -> None:
            self.next(step.doing)
            progress(step)

        return step

    def next(self, doing: str, at: float | None = None) -> None:
        """End the current part, now or at time `at`, and begin `doing`."""
        now = self._clock() if at is None else at
        self.parts[self._doing] = self.parts.get(self._doing, 0.0) + now - self._since
        self._since, self._doing = now, doing.partition(" (")[0]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.parts.items())


@contextlib.contextmanager
def startup_line(stream: TextIO) -> Iterator[StartupProgress]:
    """Show each step and the elapsed time on a terminal or in a notebook; nothing elsewhere."""
    if not (stream.isatty() or _in_notebook()):
        yield silent
        return
    bar = new_bar(stream, None, "{desc} [{elapsed}]", leave=False, position=0, desc="starting")
    ready = threading.Event()
    ticking = threading.Thread(target=_tick, args=(bar, ready), name="start-up line", daemon=True)
    ticking.start()
    try:
        yield lambda step: bar.set_description_str(_words(step), refresh=False)
    finally:
        ready.set()
        ticking.join()
        bar.close()


def _tick(bar: Any, ready: threading.Event) -> None:
    while not ready.wait(REDRAW_SECONDS):
        bar.refresh()


def _words(step: StartupStep) -> str:
    if step.total == 1:
        return step.doing
    return f"{step.doing}: {100 * step.done // max(step.total, 1)} %"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
