"""The commands that write a record and replay it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import commands_use, invoke
from tests.support.record_edits import altered, other_hash, put
from tests.support.tiers import in_ci
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.record import Record, read_record, to_json, write_record


@pytest.fixture
def loaded(tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Always the tiny engine; the list records the requested options."""
    asked: list[dict[str, Any]] = []

    commands_use(monkeypatch, lambda options: asked.append(options) or tiny)
    return asked


def test_verify_records_and_replay_repeats(tmp_path: Path, loaded: list[dict[str, Any]]) -> None:
    path = tmp_path / "record.json"
    result = invoke("verify", "--requests", 24, "--schedules", 2, "--record", path)
    assert result.exit_code == 0, result.output
    record = read_record(path)
    assert len(record.schedule.cases) == 12 and record.schedule.lag == 1, "the last schedule of two"
    result = invoke("replay", path, "--model", "elsewhere")
    assert result.exit_code == 0, result.output
    assert "same plans, same tokens, same logprob bits" in result.output
    assert loaded[-1]["model"] == "elsewhere"
    assert loaded[-1]["max_num_seqs"] == 8 and loaded[-1]["key_buckets"] == (48,)
    assert invoke("replay", path).exit_code == 0 and loaded[-1]["model"] == "random"


@pytest.mark.parametrize("against", in_ci(("alone", "config"), ["alone"]))
def test_verify_prints_one_json_document(against: str, loaded: list[dict[str, Any]]) -> None:
    result = invoke("verify", "--requests", 4, "--schedules", 1, "--against", against, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1 and report["against"] == against and report["ok"] is True
    if against == "alone":
        assert report["requests"] == 4 and report["tokens"] > 0 and report["differing_bits"] == 0
        assert report["admissions"] >= 4 and sum(report["finish_reasons"].values()) == 4
    else:
        assert {each["name"] for each in report["results"]} >= {"lag 0", "prefill for decode"}


def test_replay_exit_statuses(tmp_path: Path, honest: Record, loaded: list[dict[str, Any]]) -> None:
    path = tmp_path / "record.json"
    write_record(path, altered(honest, lambda data: other_hash(data, 5)))
    result = invoke("replay", path)
    assert result.exit_code == 1 and "step 5" in result.output
    write_record(path, altered(honest, put("platform", "jax", value="0.1")))
    result = invoke("replay", path)
    assert result.exit_code == 2 and "record_mismatch" in result.output and "jax: 0.1" in result.output
    assert invoke("replay", path, "--force").exit_code == 0
    path.write_text(to_json(honest)[:5000])
    result = invoke("replay", path)
    assert result.exit_code == 2 and str(path) in result.output and "not JSON" in result.output
    assert invoke("replay", tmp_path / "missing.json").exit_code == 2
    write_record(path, altered(honest, lambda data: data["requests"][0]["prompt"].append(10**6)))
    result = invoke("replay", path)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_record_file_is_refused_before_the_work(tmp_path: Path, loaded: list[dict[str, Any]]) -> None:
    result = invoke("verify", "--record", tmp_path / "no" / "where.json")
    assert result.exit_code == 2
    assert invoke("verify", "--against", "config", "--record", tmp_path / "x").exit_code == 2
