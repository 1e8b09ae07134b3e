"""Ctrl-C and SIGTERM: the first asks a run to end in order, the second ends it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

_ASKED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts(interrupt: Callable[[], None], doing: str) -> Iterator[None]:
    """Call `interrupt` on each signal, and after the first print what the program is `doing`. Main thread only."""
    said = False

    def handle(*_: Any) -> None:
        nonlocal said
        if not said:
            said = True
            with contextlib.suppress(OSError):  # straight to the terminal: the streams may be in use
                os.write(2, f"\n{doing}; once more to stop at once\n".encode())
        interrupt()

    before: dict[signal.Signals, Any] = {}
    try:
        with contextlib.suppress(ValueError):
            for number in _ASKED:
                before[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
