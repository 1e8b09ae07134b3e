"""A stage of Ray Data on a local Ray gives each row once with the same result, whichever process is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xla_engine.engine.batch_engine import XlaBatchEngine

pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
pytest.importorskip("pyarrow.parquet")
from tests.support.ray_job import CONFIG, actors_of, expected, found, rows_of, start, write_source
from xla_engine.ray import write_receipts
from xla_engine.receipts import audit

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Seconds of work behind the first of eight blocks.
    return write_source(tmp_path_factory.mktemp("source") / "in.parquet", 2000)


@pytest.fixture(scope="module")
def alone(source: Path) -> list[dict[str, Any]]:
    """What one engine makes of the rows; with more slots, which change no bit, it takes less time."""
    with XlaBatchEngine.from_pretrained(None, replace(CONFIG, max_num_seqs=16)) as engine:
        return expected(source, engine)


def test_a_killed_actor_changes_nothing(source: Path, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    process = start(source, tmp_path / "out", "-", 2)
    limit = time.monotonic() + 600
    while not list((tmp_path / "out").rglob("*.parquet")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.kill(random.Random(1).choice(actors_of(process.pid)), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert found(tmp_path / "out") == alone
    results, receipts = tmp_path / "out.jsonl", tmp_path / "out.receipts.jsonl"
    assert write_receipts(rows_of(tmp_path / "out"), results, receipts) == len(alone)
    report = audit(results, receipts, sample=0.1)
    assert report.ok and report.checked == len(alone) // 10, report.lines()


def test_a_killed_driver_goes_on_from_its_checkpoint(
    source: Path, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    target, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    first = start(source, target, checkpoint, 1)
    limit = time.monotonic() + 600
    while not list(checkpoint.rglob("*.parquet")):
        assert first.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(source, target, checkpoint, 1)
    _, errors = second.communicate(timeout=1800)
    assert second.returncode == 0, errors.decode()[-3000:]
    assert found(target) == alone  # each key once
