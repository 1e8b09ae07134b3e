"""The line that says what an engine does before it serves."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from xla_engine import LLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.utils import startup
from xla_engine.utils.startup import StartTimes, StartupStep, startup_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_each_step_and_a_clock_and_is_clean_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "REDRAW_SECONDS", 0.001)
    screen = Terminal()
    with startup_line(screen) as show:
        for step in (StartupStep("C++ operations"), StartupStep("loading weights", 1, 4)):
            show(step)
            wanted = "loading weights: 25 % [00:" if step.total == 4 else "C++ operations [00:"
            while wanted not in screen.getvalue():
                time.sleep(0.001)
    assert screen.getvalue().rstrip("\r").endswith(" ")  # wiped


def test_a_model_in_python_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM()` printed nothing for 15 s."""
    monkeypatch.setattr(startup, "REDRAW_SECONDS", 0.001)
    screen = Terminal()

    def start(model: Any, config: Any, *, progress: Any) -> Any:
        progress(StartupStep("compiling programs", 3, 12))
        while "compiling programs: 25 %" not in screen.getvalue():
            time.sleep(0.001)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(XlaBatchEngine, "from_pretrained", start)
    LLM().close()


def test_what_is_no_terminal_gets_nothing() -> None:
    screen = io.StringIO()
    with startup_line(screen) as show:
        show(StartupStep("loading weights", 1, 4))
    assert screen.getvalue() == ""


def test_a_start_that_fails_leaves_no_line() -> None:
    screen = Terminal()
    with contextlib.suppress(ZeroDivisionError), startup_line(screen) as show:
        show(StartupStep("self-check"))
        raise ZeroDivisionError
    assert screen.getvalue().split("\r")[-2].strip() == ""


def test_the_parts_of_a_start_add_up_to_all_of_it() -> None:
    """A summary explained 8 of 30 seconds."""
    now = 10.0
    shown: list[StartupStep] = []
    times = StartTimes(began=4.0, clock=lambda: now)
    progress = times.following(shown.append)
    steps = [
        "C++ kernels for this CPU (some 15 s)",
        "loading weights",
        "compiling programs",
        "compiling programs",
    ]
    for step in map(StartupStep, steps):
        progress(step)
        now += 1.5
    times.next("first token")
    times.next("", at=now + 2.0)
    assert times.parts == {
        "imports and model files": 6.0,
        "C++ kernels for this CPU": 1.5,
        "loading weights": 1.5,
        "compiling programs": 3.0,
        "first token": 2.0,
    }
    assert sum(times.parts.values()) == now + 2.0 - 4.0 and [each.doing for each in shown] == steps
    assert str(times).endswith("compiling programs 3.00 s, first token 2.00 s")
