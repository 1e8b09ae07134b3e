"""The time limits of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import invoke
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]

HANGS = """
import threading
from xla_engine import cli
from xla_engine.engine.batch_engine import XlaBatchEngine
XlaBatchEngine.from_pretrained = lambda *_, **__: threading.Event().wait()
cli.main()
"""


@pytest.mark.full
def test_a_start_that_hangs_ends_with_its_reason(tmp_path: Path) -> None:
    """This holds for `run` and `serve`, and nothing is written."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    for command in (["run", str(source), "-o", str(tmp_path / "out.jsonl")], ["serve", "--port", "0"]):
        done = subprocess.run(
            [sys.executable, "-c", HANGS, *command, "--start-timeout", "0.5"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "not ready after 0.5 s (--start-timeout)" in done.stderr
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_a_start_in_time_is_left_alone(engine: FakeEngine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    options = ("--start-timeout", "600", "--step-timeout", "60")
    assert invoke("run", source, "-o", tmp_path / "out.jsonl", "--no-progress", *options).exit_code == 0
    assert engine.options["step_timeout_s"] == 60.0  # type: ignore[attr-defined]
    assert invoke("run", source, "--dry-run", *options).exit_code == 0
    assert invoke("run", source, "--dry-run", "--step-timeout", "0").exit_code == 2
