"""The command in a process of its own: hostile files, a real interrupt and a closed pipe."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_lines import by_line
from tests.support.command_line import ROOT, records_of

ATTACKS = {
    "invalid_json_line": [
        b'{"prompt": "broken',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',
        rb'{"prompt": "\ud800"}',
        b"[" * 100_000,
    ],
    "line_too_long": [b'{"prompt": "' + b"x" * 10_000_000 + b'"}'],
    "duplicate_custom_id": [b'{"prompt": "x", "custom_id": "twice"}'],
    "token_limit_exceeded": [
        b'{"prompt": "x", "max_tokens": 100000}',
        b'{"prompt": "%s", "max_tokens": 1}' % (b"def f(x): return x " * 20_000),
    ],
    "invalid_request": [
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [1000000]}',
        b'{"prompt": [-1]}',
        b'{"prompt": "x", "max_tokens": 0}',
        b'{"prompt": "x", "temperature": -1}',
        b'{"prompt": "x", "top_p": 0}',
        b'{"prompt": "x", "unknown": 1}',
        b'{"method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}',
    ],
}

GOOD = [
    b'{"prompt": "def f(x):\\n", "temperature": 0, "ignore_eos": true, "max_tokens": 5, "custom_id": "twice",'
    b' "logprobs": 0}',
    b'{"prompt": [10, 11, 12], "seed": 1, "max_tokens": 7}',
    b'{"custom_id": "c", "method": "POST", "url": "/v1/completions",'
    b' "body": {"model": "m", "prompt": "import ", "max_tokens": 3, "seed": 2, "logprobs": 0}}',
]


def start(*arguments: str | Path, python: tuple[str, ...] = ("-m", "xla_engine")) -> subprocess.Popen[bytes]:
    command = [sys.executable, *python, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.full
def test_attacks_get_error_lines_and_their_neighbours_the_same_bits(tmp_path: Path) -> None:
    """Every bad line of the list between good ones, through the real engine on the embedded model."""
    expected = [(code, raw) for code, raws in ATTACKS.items() for raw in raws]
    bad = [raw for _, raw in expected]
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(GOOD))
    (tmp_path / "all.jsonl").write_bytes(b"\n".join([*GOOD, *bad, GOOD[1]]))
    for name, status in (("good", 0), ("all", 1)):
        process = start("run", tmp_path / f"{name}.jsonl", "-o", tmp_path / f"{name}.out")
        _, stderr = process.communicate(timeout=1800)
        assert process.returncode == status, stderr.decode()
        assert b"Traceback" not in stderr
    alone, together = (by_line(records_of(tmp_path / f"{name}.out")) for name in ("good", "all"))

    def choices(records: dict[int, dict[str, Any]], line: int) -> Any:
        return records[line]["response"]["body"]["choices"]

    for line, cap in ((1, 5), (2, 7), (3, 3)):
        assert 1 <= alone[line]["response"]["body"]["usage"]["completion_tokens"] <= cap
    assert (
        len(choices(alone, 1)[0]["logprobs"]["token_logprobs"]) > 0
        and choices(alone, 2)[0]["logprobs"] is None
    )
    assert alone[3]["custom_id"] == "c" and alone[3]["response"]["body"]["model"] == "m"
    for line in (1, 2, 3):
        assert choices(together, line) == choices(alone, line)
    assert choices(together, len(together)) == choices(alone, 2)
    for line, (code, raw) in enumerate(expected, len(GOOD) + 1):
        error = together[line]["error"]
        assert error and (error["code"], error["line"]) == (code, line), (raw[:60], together[line])
    assert len(together) == len(GOOD) + len(bad) + 1
    messages = [record["error"]["message"] for record in together.values() if record["error"]]
    over = next(message for message in messages if "(100000)" in message)
    assert "100001" in over and "max_model_len" in over  # all three numbers of the sum and its limit


@pytest.mark.full
def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """An interrupt after the first results: status 130, complete lines only."""
    lines = b'{"prompt": "def f(x):\\n", "ignore_eos": true, "max_tokens": 50}\n' * 10_000
    (tmp_path / "in.jsonl").write_bytes(lines)
    out = tmp_path / "out.jsonl"
    # A shell may start its background jobs, this test among them, with SIGINT ignored.
    listen = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import xla_engine.__main__"
    )
    process = start("run", tmp_path / "in.jsonl", "-o", out, python=("-c", listen))
    deadline = time.monotonic() + 600
    while (
        not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=1800)
    assert process.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr and b"interrupted: " in stderr and b"a second signal stops" in stderr
    assert 0 < len(by_line(records_of(out))) < 10_000
    assert b" 0 running requests" in stderr  # the first interrupt let them finish


@pytest.mark.full
def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    """As with `| head -1`: no traceback, no second message at exit."""
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "def f(x):\\n", "max_tokens": 3}\n' * 500)
    process = start("run", tmp_path / "in.jsonl", "-o", "-")
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=1800) == 1, stderr
    assert json.loads(first)["error"] is None
    assert "Broken pipe" in stderr and "Traceback" not in stderr and "Exception ignored" not in stderr
