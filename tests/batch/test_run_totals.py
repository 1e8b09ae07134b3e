"""What a run counts and shows: totals, progress and the summary."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from tests.support.batch_lines import prompts
from tests.support.batch_runs import LINES, run
from xla_engine.batch.totals import RunTotals, summary_lines
from xla_engine.observability.stats import EngineStats
from xla_engine.utils.progress import Progress


def test_totals_count_results_and_errors() -> None:
    data = b"\n".join([LINES["good"], LINES["broken"], LINES["ids"], LINES["zero"], LINES["zero"]])
    _, totals = run(data)
    assert (totals.ok, totals.failed) == (2, {"invalid_json_line": 1, "invalid_request": 2})
    assert (totals.prompt_tokens, totals.generated_tokens) == (6, 4)
    assert [error.line for error in totals.first_errors] == [2, 4, 5]
    stats = EngineStats(compiles_warmup=5, cached_tokens=7, prompt_tokens=4)
    text = "\n".join(summary_lines(totals, stats, wall=2.0, cold_start=1.5))
    assert "time to first token  none" not in text
    assert "7 tokens found, 4 computed" in text and "preemptions" not in text
    for part in (
        "5: 2 ok, 3 failed (invalid_json_line 1, invalid_request 2)",
        "6 prompt, 4 generated, 2.0 tok/s",
    ):
        assert part in text
    assert "5 before, 0 after warm-up" in text and "1.50 s from process start" in text


def test_no_latency_without_samples() -> None:
    assert "time to first token  none" in summary_lines(RunTotals(), EngineStats(), wall=1.0, cold_start=None)


def test_a_run_that_pools_says_how_many_texts_it_read() -> None:
    """Nothing is generated, so there is no time between tokens, no finish reason and no slot that decodes."""
    totals = RunTotals(ok=30, prompt_tokens=600, failed=Counter(token_limit_exceeded=1))
    lines = summary_lines(totals, EngineStats(), wall=2.0, cold_start=1.5)
    assert (
        "texts                15.0 a second" in lines
        and "tokens               600 prompt, 300.0 tok/s" in lines
    )
    assert not [line for line in lines if "generated" in line or "inter-token" in line or "finish" in line]


class Screen(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize("total", [40, None])
def test_progress_is_a_bar_on_a_terminal(total: int | None) -> None:
    screen = Screen(tty=True)
    with Progress(total, slots=16, stream=screen) as progress:
        progress.show(done=12, tokens=100, busy=7)
    assert "12/40 requests" in screen.getvalue() if total else "12 requests" in screen.getvalue()
    assert "7/16 slots busy" in screen.getvalue() and "tok/s" in screen.getvalue()


def test_progress_is_a_line_now_and_then_elsewhere() -> None:
    screen, now = Screen(tty=False), [0.0]
    with Progress(40, slots=16, stream=screen, clock=lambda: now[0]) as progress:
        assert not progress.due
        now[0] = 5.0
        assert progress.due
        progress.show(done=12, tokens=100, busy=7)
        assert not progress.due
    assert screen.getvalue() == "12/40 requests, 5 s (about 0:12 left), 20 tok/s, 7/16 slots busy\n"


def test_progress_can_be_off() -> None:
    with Progress(40, slots=16, stream=None) as progress:
        assert not progress.due
        progress.show(done=40, tokens=100, busy=0)


def test_the_summary_counts_finish_reasons() -> None:
    _, totals = run(prompts(3) + b'{"prompt": "", "max_tokens": 2}\n')
    assert totals.finish_reasons.total() == 3
    text = summary_lines(totals, EngineStats(), wall=1.0, cold_start=None)
    assert any(
        line.startswith("finish reasons") and line.endswith(f"{reason} {count}")
        for line in text
        for reason, count in totals.finish_reasons.items()
    )
