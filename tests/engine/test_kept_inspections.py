"""A report that was kept is the one that would be made now, and is not used if what it depends on changed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import xla_engine.engine.inspection as inspection
from tests.support.gguf_files import Kind, write_gguf
from xla_engine.config import AUTO, EngineConfig
from xla_engine.engine.inspection_report import Inspection, report_lines
from xla_engine.engine.kept_inspections import inspect_or_recall
from xla_engine.model_loader.config_only import open_named
from xla_engine.utils import host_memory

MODEL = Path(__file__).parents[1] / "golden" / "gqa_tied"
CONFIG = EngineConfig(max_num_seqs=8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The models that were inspected, in turn, on a machine with 8 GB free, with an empty cache."""
    monkeypatch.setenv("XLA_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host_memory, "available", lambda: 8 << 30)
    found: list[str] = []
    inspect = inspection.inspect_model

    def noting(files: object, config: EngineConfig) -> Inspection:
        report = inspect(files, config)  # type: ignore[arg-type]
        found.append(report.path)
        return report

    monkeypatch.setattr(inspection, "inspect_model", noting)
    return found


@pytest.mark.parametrize("form", ["directory", "file"])
@pytest.mark.parametrize("free", [8 << 30, 5 << 30, None])
def test_a_kept_report_is_the_one_that_would_be_made(
    form: str, free: int | None, made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = MODEL
    if form == "file":
        model = write_gguf(MODEL, tmp_path / "model.gguf", kind=Kind.F32)
    first = inspect_or_recall(open_named(model), CONFIG)
    assert first.ok and len(made) == 1
    monkeypatch.setattr(host_memory, "available", lambda: free)
    kept = inspect_or_recall(open_named(model), CONFIG)
    assert len(made) == 1
    again = inspection.inspect_model(open_named(model), CONFIG)
    for report in (kept, again):  # rates are measured
        report.forms = [each | {"tokens_per_s": None} for each in report.forms]
    assert report_lines(kept) == report_lines(again)
    assert json.dumps(kept.to_json()) == json.dumps(again.to_json())


def test_a_model_that_no_longer_fits_is_inspected_again(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect_or_recall(open_named(MODEL), CONFIG).ok
    monkeypatch.setattr(host_memory, "available", lambda: 100_000)
    report = inspect_or_recall(open_named(MODEL), CONFIG)
    assert len(made) == 2 and "does not fit" in report.problems[0]


def test_changed_files_options_and_variables_are_inspected_again(
    made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    for times, change in enumerate(
        (
            lambda: None,
            lambda: os.utime(model / "config.json", ns=(1, 1)),
            lambda: (model / "chat_template.jinja").write_text("x"),
            lambda: monkeypatch.setenv("XLA_ENGINE_ISA", "none"),
        ),
        1,
    ):
        change()
        for _ in range(2):
            inspect_or_recall(open_named(model), CONFIG)
        assert len(made) == times
    inspect_or_recall(open_named(model), replace(CONFIG, max_num_seqs=9))
    assert len(made) == 5


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": AUTO}, {"bits": "portable"}, {"compile_cache": False}], ids=str
)
def test_reports_that_depend_on_more_are_not_kept(options: dict[str, object], made: list[str]) -> None:
    for _ in range(2):
        inspect_or_recall(open_named(MODEL), replace(CONFIG, **options))  # type: ignore[arg-type]
    assert len(made) == 2


def test_a_model_with_a_problem_is_inspected_again(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        assert not inspect_or_recall(open_named(tmp_path), CONFIG).ok
    assert len(made) == 2
