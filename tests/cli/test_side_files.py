"""What a run writes beside its output names itself when it cannot be written; a failed line is remembered."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path

import pytest

from tests.support.batch_lines import prompts
from tests.support.command_line import assert_not_started, invoke, run_file
from tests.support.fake_engine import FakeEngine
from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability import step_log_writer
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.sampling_params import SamplingParams

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")


@needs_full
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("option", ["--status-file", "--metrics-file"])
def test_a_file_that_cannot_be_written_is_the_one_that_is_named(option: str, tmp_path: Path) -> None:
    result, _ = run_file(tmp_path, prompts(3), option, str(FULL))
    assert_not_started(result, "/dev/full: No space left on device")
    assert FULL.is_char_device()  # a device is not replaced by a file


class _Fills(io.StringIO):
    """A file on a disk that is full after 1,000 characters."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_step_log_that_fills_the_disk_ends_no_request_and_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log_writer, "open", lambda *_, **__: _Fills(), raising=False)
    with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE) as engine:
        logging = contextlib.ExitStack()
        logging.enter_context(logging_steps(engine, tmp_path / "steps.jsonl"))
        for _ in range(4):
            engine.submit([3, 1, 4], SamplingParams(max_tokens=8))
        done = [output for output in engine.drain() if output.finished]
        with pytest.raises(OSError, match=r"No space left on device: .*steps\.jsonl"):
            logging.close()
        assert [output.outputs[0].finish_reason for output in done] == ["length"] * 4
        if FULL.is_char_device():
            monkeypatch.undo()
            with pytest.raises(OSError, match="/dev/full"), logging_steps(engine, FULL):
                raise AssertionError("the first line is written before the block runs")


@pytest.mark.usefixtures("engine")
def test_a_resumed_file_with_failed_lines_exits_as_the_run_did(tmp_path: Path) -> None:
    data = prompts(3) + b'{"prompt": "x", "max_tokens": 0}\n'
    first, records = run_file(tmp_path, data)
    again, same = run_file(tmp_path, data, "--resume")
    assert (first.exit_code, again.exit_code) == (1, 1) and same == records
    assert "4 done before, 1 of them failed" in again.stderr
    errors = tmp_path / "errors.jsonl"
    separate, _ = run_file(tmp_path, data, "--overwrite", "--errors", str(errors))
    again, _ = run_file(tmp_path, data, "--resume", "--errors", str(errors))
    assert (separate.exit_code, again.exit_code) == (1, 1)


def test_a_dry_run_takes_the_options_of_the_run(tmp_path: Path, engine: FakeEngine) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(prompts(2))
    options = (
        "--errors",
        tmp_path / "e",
        "--resume",
        "--ordered",
        "--shard",
        "0/2",
        "--step-log",
        tmp_path / "s",
    )
    result = invoke("run", source, "-o", target, *options, "--fingerprint", "--dry-run")
    assert result.exit_code == 0 and "2: 2 ok" in result.stdout
    assert sorted(tmp_path.iterdir()) == [source]
