"""Jobs of Ray Data that are killed, and what one engine makes of their rows."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.command_line import ROOT
from tests.support.ray_driver import postprocess, preprocess
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=128, prefill_lanes=(2,), self_check=False)
WORDS = ["def f(x):", "import os", "class A:", "for i in range(3):"]


def write_source(path: Path, rows: int) -> Path:
    """The rows of a job, in `path`."""
    draw = random.Random(0)
    table = pa.table(
        {
            "key": [f"k{number}" for number in range(rows)],
            "text": [f"{draw.choice(WORDS)} # {number}" for number in range(rows)],
            "length": [draw.randrange(1, 40) for _ in range(rows)],
        }
    )
    pq.write_table(table, path, row_group_size=-(-rows // 8))
    return path


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
    rows = rows_of(target)
    assert all(row.pop("__inference_error__") == "" and row.pop("receipt") for row in rows)
    return rows


def rows_of(target: Path) -> list[dict[str, Any]]:
    """The rows of a job, with their receipts."""
    return sorted(pq.read_table(target).to_pylist(), key=lambda row: int(row["key"][1:]))


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
