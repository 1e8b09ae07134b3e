"""A few of the hostile lines of `spikes/015_fuzz_batch_lines.py`, and that what they check can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz_lines import cases, fuzz
from xla_engine.engine import XlaBatchEngine


@pytest.fixture
def chatty(embedded: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The embedded model, which gets a chat template for the time of a test."""
    yield embedded
    embedded.chat_template = None


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_lines_crash_hang_and_lose_nothing(chatty: XlaBatchEngine, seed: int) -> None:
    report = fuzz(chatty, 700, seed=seed)
    assert not report.problems
    assert report.sentinels == 2 and report.results > 50 and len(report.codes) >= 3
    assert chatty.stats().compiles_after_warmup == 0 and not chatty.has_unfinished


def test_the_fuzz_run_can_fail(chatty: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seen = chatty.submit, []

    def faulty(prompt: Any, params: Any = None, **options: Any) -> str:
        seen.append(prompt)
        if len(seen) == 5:
            raise ZeroDivisionError("planted")
        return submit(prompt, params, **options)

    monkeypatch.setattr(chatty, "submit", faulty)
    assert any("planted" in problem for problem in fuzz(chatty, 100).problems)


def test_the_cases_repeat_and_are_lines() -> None:
    first, again = ([next(stream) for _ in range(200)] for stream in (cases(3), cases(3)))
    assert first == again and not any(b"\n" in raw for raw in first)
    kinds = {type(_load(raw)) for raw in first}
    assert dict in kinds and type(None) in kinds


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
