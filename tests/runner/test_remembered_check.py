"""A start reuses an earlier self-check if nothing that its result depends on has changed; else it checks again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.runner.self_check import remembered
from xla_engine.runner.self_check.check import SelfCheck, run_self_check


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SelfCheck | None]:
    """The checks that ran; the directory of results is empty at first."""
    found: list[SelfCheck | None] = []

    def run(*arguments: Any) -> SelfCheck | None:
        found.append(run_self_check(*arguments))
        return found[-1]

    monkeypatch.setattr(remembered, "run_self_check", run)
    monkeypatch.setattr(remembered, "compile_cache_directory", lambda: tmp_path)
    return found


def start(config: EngineConfig = TINY_ENGINE, checkpoint: Checkpoint | None = None) -> SelfCheck:
    with XlaBatchEngine(checkpoint or tiny_checkpoint(), None, config) as engine:
        assert engine.self_check is not None
        return engine.self_check


def test_the_same_start_reads_what_the_first_one_saw(runs: list[SelfCheck | None]) -> None:
    first, second = start(), start()
    assert runs == [first] and first.day is None and second.day is not None
    assert replace(second, day=None) == first
    assert f"compared on {second.day}" in second.promise and "compared on" not in first.promise


@pytest.mark.full
def test_whatever_may_change_a_bit_is_checked(
    runs: list[SelfCheck | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options, weights, XLA's flags, the processor, the code, and programs themselves."""
    start()
    start(replace(TINY_ENGINE, max_num_seqs=TINY_ENGINE.num_slots + 1))
    start(checkpoint=replace(tiny_checkpoint(), fingerprint="others"))
    for name in ("xla_flags", "processor", "package_digest", "cores"):
        with monkeypatch.context() as patch:
            patch.setattr(remembered, name, lambda *_: "others")
            start()
    with monkeypatch.context() as patch:
        patch.setattr(
            "xla_engine.runner.runner.Runner.reports",
            property(lambda runner: [replace(each, digest="others") for each in runner.inventory]),
        )
        start()
    assert len(runs) == 8
    start()
    assert len(runs) == 8


@pytest.mark.parametrize("damage", ["torn", "not ours", "of another version"])
def test_a_file_that_cannot_be_read_is_no_answer(
    runs: list[SelfCheck | None], tmp_path: Path, damage: str
) -> None:
    start()
    (path,) = (tmp_path / "self_checks").glob("*.json")
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "not ours":
        path.chmod(0o666)
    else:
        path.write_text('{"samples": 3}')
    start()
    start()
    assert len(runs) == 2  # the second made it anew


def test_nothing_is_kept_of_a_check_that_found_a_difference(
    runs: list[SelfCheck | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def differs(*arguments: Any) -> SelfCheck | None:
        check = run_self_check(*arguments)
        assert check is not None
        return replace(check, prefill_equals_decode=False, differences=("sample 3",))

    monkeypatch.setattr(remembered, "run_self_check", differs)
    assert start().day is None and start().day is None
    assert not list((tmp_path / "self_checks").iterdir())


@pytest.mark.full
def test_without_a_cache_of_programs_every_start_checks(runs: list[SelfCheck | None], tmp_path: Path) -> None:
    config = replace(TINY_ENGINE, compile_cache=False)
    start(config)
    start(config)
    assert len(runs) == 2 and not list(tmp_path.iterdir())
