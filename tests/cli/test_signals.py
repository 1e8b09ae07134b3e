"""How signals are handled, without a run."""

from __future__ import annotations

import signal

import pytest

from xla_engine.cli._run import interrupts


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timers that were set, which never fire by themselves."""
    found: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: found.append(seconds))
    return found


def test_sigterm_asks_again_after_the_drain_timeout(
    timers: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    before, asked = signal.getsignal(signal.SIGALRM), []
    with interrupts(lambda: asked.append(1), "finishing", 30.0):
        signal.raise_signal(signal.SIGTERM)
        assert timers == [30.0] and len(asked) == 1
        signal.raise_signal(signal.SIGALRM)
        assert len(asked) == 2
    assert timers == [30.0, 0] and signal.getsignal(signal.SIGALRM) == before
    assert "a second signal stops at once" in (text := capfd.readouterr().err) and "after 30.0 s" in text


def test_ctrl_c_sets_no_timer_and_a_second_sigterm_asks_at_once(timers: list[float]) -> None:
    asked: list[int] = []
    with interrupts(lambda: asked.append(1), "finishing", 30.0):
        signal.raise_signal(signal.SIGINT)
        assert timers == []
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert len(asked) == 2 and timers == [0]
    with interrupts(lambda: asked.append(1), "finishing"):
        signal.raise_signal(signal.SIGTERM)
    assert len(asked) == 3 and timers == [0]
