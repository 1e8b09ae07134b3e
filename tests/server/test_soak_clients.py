"""The clients of the soak: an honest server passes, and planted faults are found."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.server.conftest import Running
from xla_engine.server.completions import Completions
from xla_engine.tools.soak import http_rounds
from xla_engine.tools.soak.http_rounds import HttpRounds
from xla_engine.tools.soak.report import SoakReport

MIB = 1 << 20


class Rounds:
    """Rounds of clients of the session's server."""

    def __init__(self, port: int) -> None:
        self.report = SoakReport(0, 0)
        self.rounds = HttpRounds(port, os.getpid(), self.report)

    def run(self, name: str) -> list[str]:
        """What broke in a round."""
        self.report.problems.clear()
        self.rounds.run(name)
        return self.report.problems


@pytest.fixture
def rounds(server: Running) -> Rounds:
    return Rounds(server.port)


@pytest.mark.full
def test_a_server_holds_under_its_clients(rounds: Rounds) -> None:
    assert rounds.run("0") == [] and rounds.run("1") == []
    report = rounds.report
    assert report.counts["HTTP answers compared"] == 32 and report.hostile.total() == 96
    assert {400, 200, None} <= set(report.hostile) and 0 < report.slowest_health_s < 60
    assert "memory of the server" in report.unmeasured and not report.server_grows


@pytest.mark.full
def test_an_answer_that_is_another_is_found(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_rounds, "_HOSTILE_CLIENTS", 0)
    assert rounds.run("0") == []
    rounds.rounds._expected = [
        (body, [{**choices[0], "text": "planted"}, *choices[1:]]) for body, choices in rounds.rounds._expected
    ]
    problems = rounds.run("1")
    assert problems and all(
        "an honest client" in problem and "not as alone" in problem for problem in problems
    )


@pytest.mark.full
def test_a_server_error_is_found(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds.run("0") == []

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(Completions, "parse", fail)
    problems = rounds.run("1")
    assert any("an honest client" in problem and "is answered 500" in problem for problem in problems)
    assert any(": a client that " in problem and "is answered 500" in problem for problem in problems)


@pytest.mark.full
def test_what_is_left_of_a_client_is_found(
    rounds: Rounds, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_rounds, "_IDLE_S", 0.2)
    monkeypatch.setattr(http_rounds, "_HOSTILE_CLIENTS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(server.service, "live", 1)
        assert any("left with {'live': 1}" in problem for problem in rounds.run("0"))


def test_memory_of_the_server_has_a_bound_and_is_measured_or_said_not_to_be() -> None:
    def report(*sizes: int) -> SoakReport:
        flat = [(24 * index, 900 * MIB) for index in range(9)]
        return SoakReport(0, 0, resident=flat, hostile=Counter([400]), server=[size * MIB for size in sizes])

    for sizes, grows in (((300, 310, 350, 320), False), ((300, 310, 361, 310), True)):
        found = report(*sizes)
        assert found.server_grows is grows and found.ok is not grows
        text = "\n".join(found.lines())
        assert ("all held" in text.splitlines()) is not grows and ", ".join(map(str, sizes)) in text
        assert ("the memory of the server grows" in text) is grows
    few = report(1, 1)
    assert few.ok and "not measured: memory of the server;" in few.lines()[-1]
    assert "all held" not in "\n".join(few.lines())
