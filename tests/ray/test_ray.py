"""A stage of Ray Data on a local Ray gives each row once with the same result, whichever process is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from xla_engine.engine.batch_engine import XlaBatchEngine

pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
pytest.importorskip("pyarrow.parquet")
from tests.support.ray_job import CONFIG, actors_of, expected, found, start, write_source

pytestmark = pytest.mark.full


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", 2000)  # seconds of work behind the first of eight blocks


@pytest.fixture(scope="module")
def single() -> Any:
    with XlaBatchEngine.from_pretrained(None, CONFIG) as engine:
        yield engine


def test_a_killed_actor_changes_nothing(source: Path, tmp_path: Path, single: XlaBatchEngine) -> None:
    process = start(source, tmp_path / "out", "-", 2)
    limit = time.monotonic() + 600
    while not list((tmp_path / "out").rglob("*.parquet")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.kill(random.Random(1).choice(actors_of(process.pid)), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert found(tmp_path / "out") == expected(source, single)


def test_a_killed_driver_goes_on_from_its_checkpoint(
    source: Path, tmp_path: Path, single: XlaBatchEngine
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
    assert found(target) == expected(source, single)  # each key once
