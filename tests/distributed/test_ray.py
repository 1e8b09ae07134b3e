"""A stage of Ray Data on a local Ray: each row once with the same result, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import ROOT
from tests.support.ray_driver import postprocess, preprocess
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
pq = pytest.importorskip("pyarrow.parquet")
import pyarrow as pa  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 120
WORDS = ["def f(x):", "import os", "class A:", "for i in range(3):"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draw = random.Random(0)
    table = pa.table(
        {
            "key": [f"k{number}" for number in range(ROWS)],
            "text": [f"{draw.choice(WORDS)} # {number}" for number in range(ROWS)],
            "length": [draw.randrange(1, 40) for _ in range(ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=15)
    return tmp_path / "in.parquet"


@pytest.fixture(scope="module")
def single() -> Any:
    config = EngineConfig(max_num_seqs=4, max_model_len=128, prefill_lanes=(2,), self_check=False)
    with XlaBatchEngine.from_pretrained(None, config) as engine:
        yield engine


def expected(source: Path, engine: XlaBatchEngine) -> list[dict[str, Any]]:
    """What one engine makes of the rows."""
    rows = pq.read_table(source).to_pylist()
    for row in rows:
        fields = preprocess(row)
        params = SamplingParams(**fields["sampling_params"])
        engine.submit(
            fields["prompt"], params.clone(seed=engine.seed_of(row["key"], params)), request_id=row["key"]
        )
    outputs = {output.request_id: output.outputs[0] for output in engine.drain()}
    return [
        postprocess(
            row
            | {
                "generated_text": outputs[row["key"]].text,
                "generated_tokens": [*outputs[row["key"]].token_ids],
            }
        )
        for row in rows
    ]


def found(target: Path) -> list[dict[str, Any]]:
    rows = pq.read_table(target).to_pylist()
    assert all(row.pop("__inference_error__") == "" for row in rows)
    return sorted(rows, key=lambda row: int(row["key"][1:]))


def start(source: Path, target: Path, checkpoint: Path | str, actors: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.support.ray_driver",
        str(source),
        str(target),
        str(checkpoint),
        str(actors),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def actors_of(pid: int) -> list[int]:
    """The processes below one that hold an engine."""
    parents = {}
    titles = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue

    def is_below(each: int) -> bool:
        while each and each != pid:
            each = parents.get(each, 0)
        return each == pid

    return [each for each, title in titles.items() if "EngineActor" in title and is_below(each)]


def test_a_killed_actor_changes_nothing(source: Path, tmp_path: Path, single: XlaBatchEngine) -> None:
    process = start(source, tmp_path / "out", "-", 2)
    killed, limit = 0, time.monotonic() + 400
    while process.poll() is None:
        assert time.monotonic() < limit
        if killed < 1 and len(alive := actors_of(process.pid)) == 2:
            time.sleep(12)  # it has rows by then
            os.kill(random.Random(1).choice(alive), signal.SIGKILL)
            killed += 1
        time.sleep(0.5)
    _, errors = process.communicate()
    assert process.returncode == 0 and killed, errors.decode()[-3000:]
    assert found(tmp_path / "out") == expected(source, single)


def test_a_killed_driver_goes_on_from_its_checkpoint(
    source: Path, tmp_path: Path, single: XlaBatchEngine
) -> None:
    target, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    first = start(source, target, checkpoint, 1)
    limit = time.monotonic() + 300
    while first.poll() is None and not list(checkpoint.rglob("*.parquet")):
        assert time.monotonic() < limit
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(source, target, checkpoint, 1)
    _, errors = second.communicate(timeout=400)
    assert second.returncode == 0, errors.decode()[-3000:]
    assert found(target) == expected(source, single)  # each key once
