"""A worker process that is started ahead answers the first request, and one that cannot run is reported by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xla_engine.text.worker_process import WorkerEndedError, WorkerProcess

WORKER = (
    "import os\nMEMORY_LIMIT = 1 << 30\ndef answer(**fields): return {**fields, 'process': os.getpid()}\n"
)


def test_the_process_that_was_started_ahead_answers(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    process = WorkerProcess(str(tmp_path / "worker.py"))
    process.start()
    assert process.process is not None
    started = process.process.pid
    process.start()  # it runs already
    assert process.ask(5, '{"a": 1}') == {"a": 1, "process": started}
    process.stop()
    assert process.ask(5, "{}")["process"] != started
    process.stop()


def test_a_start_that_fails_is_reported_by_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no such program"))
    process = WorkerProcess("chat_worker.py")
    process.start()
    with pytest.raises(WorkerEndedError, match="cannot start its process"):
        process.ask(5, "{}")
