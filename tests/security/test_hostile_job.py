"""A file with hostile lines: `run` ends, its good lines have results, and signals are honoured meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.security.test_hostile_schemas import HOSTILE
from tests.server.bodies import TEMPLATE

GOOD = {
    "custom_id": "good",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "max_tokens": 2},
}


def job(folder: Path, lines: list[dict[str, Any]]) -> list[str]:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "chat.jinja").write_text(TEMPLATE)
    command = [
        sys.executable,
        "-m",
        "xla_engine",
        "run",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
    ]
    return [*command, "--tool-parser", "qwen3_coder", "--chat-template", str(folder / "chat.jinja")]


def hostile(strict: bool) -> list[dict[str, Any]]:
    """A line for each hostile schema."""
    return [
        {
            "custom_id": f"{name}, {strict}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 2,
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
                ],
            },
        }
        for name, schema in HOSTILE.items()
        if len(json.dumps(schema)) < 100_000
    ]


@pytest.mark.full
def test_a_job_with_hostile_lines_ends_and_has_its_good_ones(tmp_path: Path) -> None:
    """One line with a reference to itself, repeated 60 times, made a job hang for ever and write nothing."""
    lines = [*hostile(True), *hostile(False), GOOD]
    done = subprocess.run(job(tmp_path, lines), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = {
        each["custom_id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    assert len(found) == len(lines) and found["good"]["error"] is None, done.stderr


@pytest.mark.full
def test_sigterm_ends_a_job_of_hostile_lines(tmp_path: Path) -> None:
    lines = [GOOD] + [{**line, "custom_id": f"{n}"} for n, line in enumerate(hostile(True) * 2000)]
    command = job(tmp_path, lines)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text().count("\n"):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 130
        assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    finally:
        process.kill()
        process.communicate()
