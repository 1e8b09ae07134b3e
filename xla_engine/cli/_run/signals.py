"""Handle Ctrl-C and SIGTERM: the first lets a run finish in order, the second ends it."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

_ASKED = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts(
    interrupt: Callable[[], None], doing: str, drain_timeout_s: float | None = None
) -> Iterator[None]:
    """Call `interrupt` on each signal, and print `doing` after the first one. Main thread only.

    drain_timeout_s: seconds after SIGTERM at which `interrupt` is called again; None disables this.
    """
    said = False

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # straight to the terminal: the streams may be in use
            os.write(2, f"\n{text}\n".encode())

    def handle(number: int, _: Any) -> None:
        nonlocal said
        if number == signal.SIGALRM:
            say(f"not finished after {drain_timeout_s} s; cancelling the rest")
        elif not said:
            said = True
            say(f"{doing}; a second signal stops at once")
            if number == signal.SIGTERM and drain_timeout_s is not None:
                signal.setitimer(signal.ITIMER_REAL, max(drain_timeout_s, 1e-6))
        interrupt()

    before: dict[signal.Signals, Any] = {}
    try:
        with contextlib.suppress(ValueError):
            for number in (*_ASKED, *(() if drain_timeout_s is None else (signal.SIGALRM,))):
                before[number] = signal.signal(number, handle)
        yield
    finally:
        if drain_timeout_s is not None and before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
