"""What records show in a notebook: everything there, and nothing of a model's text as markup."""

from __future__ import annotations

from pathlib import Path

from xla_engine import SamplingParams, XlaBatchEngine
from xla_engine.observability.stats import EngineStats
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.outputs import CompletionOutput, RequestOutput

EVIL = "<script>alert('x')</script>"


def test_an_output_shows_its_text_escaped() -> None:
    completion = CompletionOutput(index=0, text=EVIL, token_ids=(1, 2), finish_reason="stop")
    output = RequestOutput(
        request_id=EVIL,
        prompt="a & b",
        prompt_token_ids=(1,),
        outputs=(completion,),
        finished=True,
        error=EVIL,
    )
    shown = output._repr_html_()
    assert "<script" not in shown
    assert "a &amp; b&lt;script&gt;" in shown and ">2<" in shown and "stop" in shown


def test_stats_show_every_counter() -> None:
    shown = EngineStats(steps=7, slot_steps_busy=1, slot_steps_total=4)._repr_html_()
    assert ">steps<" in shown and ">7<" in shown and ">25.0%<" in shown


def test_a_snapshot_and_a_step_log_show_slots_and_requests(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with logging_steps(tiny, path):
        for number in range(20):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            tiny.submit([5, 6, 7], params, request_id=f"<b>{number}")
        tiny.step()
        snapshot = tiny.snapshot()._repr_html_()
        tiny.drain()
    picture = read_step_log(path)._repr_html_()
    for shown in (snapshot, picture):
        assert "<b>" not in shown
        assert "&lt;b&gt;0" in shown and "&lt;b&gt;7" in shown
    assert "&lt;b&gt;19" not in snapshot and ">4 more<" in snapshot
    assert "20 requests" in picture and picture.count("<rect") == 40, "a prefill and a decode of each"
