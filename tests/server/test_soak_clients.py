"""The clients of the soak: an honest server passes, and planted faults are found."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.server.conftest import Running
from xla_engine.server.generation import Generation
from xla_engine.tools.soak import http_rounds
from xla_engine.tools.soak.http_clients import Address
from xla_engine.tools.soak.http_rounds import HttpRounds, HttpTally
from xla_engine.tools.soak.report import SoakReport

MIB = 1 << 20


@pytest.fixture
def rounds(server: Running) -> HttpRounds:
    return HttpRounds(Address(server.port), os.getpid(), 0)


@pytest.mark.full
def test_a_server_holds_under_its_clients(rounds: HttpRounds) -> None:
    assert rounds.run("0") == [] and rounds.run("1") == []
    tally = rounds.tally
    assert tally.rounds == 2 and tally.compared == 32 and tally.hostile.total() == 96
    assert {400, 200, None} <= set(tally.hostile) and 0 < tally.slowest_health_s < 60
    assert tally.ratio is None and "not measured" in tally.memory_line()


@pytest.mark.full
def test_an_answer_that_is_another_is_found(rounds: HttpRounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_rounds, "_HOSTILE_CLIENTS", 0)
    assert rounds.run("0") == []
    rounds._expected = [
        (body, [{**choices[0], "text": "planted"}, *choices[1:]]) for body, choices in rounds._expected
    ]
    problems = rounds.run("1")
    assert problems and all(
        "an honest client" in problem and "not as alone" in problem for problem in problems
    )


@pytest.mark.full
def test_a_server_error_is_found(rounds: HttpRounds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds.run("0") == []

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(Generation, "_parse", fail)
    problems = rounds.run("1")
    assert any("an honest client" in problem and "is answered 500" in problem for problem in problems)
    assert any(problem.startswith("a client that ") and "is answered 500" in problem for problem in problems)


def test_what_is_left_of_a_client_is_found(
    rounds: HttpRounds, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_rounds, "_IDLE_S", 0.2)
    monkeypatch.setattr(http_rounds, "_HOSTILE_CLIENTS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(server.service, "live", 1)
        assert any("left with {'live': 1}" in problem for problem in rounds.run("0"))


def test_memory_of_the_server_has_a_bound_and_is_measured_or_said_not_to_be() -> None:
    flat = [(24 * index, 900 * MIB) for index in range(9)]
    for sizes, grows in (([300, 310, 350, 320], False), ([300, 310, 361, 310], True)):
        tally = HttpTally(rounds=7, resident=[size * MIB for size in sizes])
        report = SoakReport(0, 0, resident=flat, http=tally)
        assert tally.grows is grows and report.ok is not grows
        text = "\n".join(report.lines())
        assert ("all held" in text.splitlines()) is not grows and "300 MiB after the warm-up" in text
        assert ("the memory of the server grows" in text) is grows
    few = SoakReport(0, 0, resident=flat[:2], http=HttpTally(rounds=5, resident=[MIB, MIB]))
    assert few.ok and few.lines()[-1] == "no problem found, but not measured: memory, memory of the server"
    assert "all held" not in "\n".join(few.lines()) and not SoakReport(0, 0, resident=flat[:2]).grows
