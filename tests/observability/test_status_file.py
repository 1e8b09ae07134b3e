"""The status file: what the engine says of itself, whole at any moment, and no reason to end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability.status_file import LiveFile, status_file
from xla_engine.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def status_of(path: Path, engine: Any, **options: Any) -> LiveFile:
    return status_file(path, engine, names=lambda name: f"<{name}>", run=lambda: {"ok": 3}, **options)


def test_it_tells_queue_slots_reasons_and_counters(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    tiny.reset_prefix_cache()  # slots are taken from the first on
    for number in range(tiny.max_num_seqs + 2):
        tiny.submit([number + 1] * 20, LONG, request_id=f"r{number}")
    for _ in range(4):
        tiny.step()
    before = tiny.runner.prefill_calls, tiny.stats().steps
    status_of(path, tiny).write()
    assert (tiny.runner.prefill_calls, tiny.stats().steps) == before
    status = json.loads(path.read_text())
    assert status["run"] == {"ok": 3} and status["pid"] > 0 and status["time"] > 1e9
    assert len(status["slots"]) == tiny.max_num_seqs and status["num_waiting"] == len(status["waiting"]) == 2
    request = status["slots"][0]["request"]
    assert (request["custom_id"], request["request_id"], request["prompt_tokens"]) == ("<r0>", "r0", 20)
    assert request["status"] and request["decision"]["action"] and request["decision"]["reason"]
    assert status["waiting"][1]["decision"]["reason"]
    assert status["counters"]["submitted"] >= 10 and status["stats"]["steps"] == before[1]
    tiny.drain()
    status_of(path, tiny).write()
    status = json.loads(path.read_text())
    assert all(slot["request"] is None for slot in status["slots"]) and not status["waiting"]
    assert status["counters"]["finished"]["length"] >= 10
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_written_now_and_then(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    now = [0.0]
    status = status_of(tmp_path / "s.json", tiny, clock=lambda: now[0])
    status.update()
    first = (tmp_path / "s.json").stat().st_ino
    status.update()
    now[0] = 0.9
    status.update()
    assert (tmp_path / "s.json").stat().st_ino == first
    now[0] = 1.1
    status.update()
    assert (tmp_path / "s.json").stat().st_ino != first
    status.update(force=True)


def test_a_write_that_fails_is_kept_for_later_and_raises_nothing(
    tiny: XlaBatchEngine, tmp_path: Path
) -> None:
    status = status_of(tmp_path / "none" / "s.json", tiny)
    status.update()
    assert isinstance(status.failure, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        status.write()
