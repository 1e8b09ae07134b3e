"""What an engine does before it serves, on one line that is gone when it is ready."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from xla_engine.utils.progress import new_bar

REDRAW_SECONDS = 0.25


class StartupStep(NamedTuple):
    """What is being done, and how much of it is done: bytes of weights, programs, or 0 of 1."""

    doing: str
    done: int = 0
    total: int = 1


StartupProgress = Callable[[StartupStep], None]


def silent(step: StartupStep) -> None:
    """Show nothing."""


@contextlib.contextmanager
def startup_line(stream: TextIO) -> Iterator[StartupProgress]:
    """Show each step and a clock that ticks, on a terminal or in a notebook; elsewhere nothing."""
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
