"""The command line: what each command prints, writes and exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.batch_lines import by_line, interrupt_at, prompts
from tests.support.command_line import ROOT, assert_not_started, invoke, records_of, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine import cli
from xla_engine.batch.lines import read_lines
from xla_engine.batch.requests import LineRequest, parse_line
from xla_engine.errors import CheckpointError


def test_all_lines_fine_is_0(tmp_path: Path, engine: FakeEngine) -> None:
    result, records = run_file(tmp_path, prompts(20))
    assert result.exit_code == 0, result.output
    assert sorted(by_line(records)) == list(range(1, 21))
    for part in (
        "20: 20 ok, 0 failed",
        "time to first token  p50",
        "slot occupancy",
        "cold start",
        "after warm-up",
    ):
        assert part in result.stderr
    assert result.stdout == ""


def test_some_failed_is_1_and_says_which(tmp_path: Path, engine: FakeEngine) -> None:
    result, records = run_file(tmp_path, prompts(3) + b"{\n" * 7)
    assert result.exit_code == 1 and len(by_line(records)) == 10
    assert "line 4: invalid_json_line: " in result.stderr and "and 2 more lines" in result.stderr
    assert "10: 3 ok, 7 failed (invalid_json_line 7)" in result.stderr


def test_interrupt_is_130_and_says_what_is_done(tmp_path: Path, engine: FakeEngine) -> None:
    engine._on_step = interrupt_at(5)
    result, records = run_file(tmp_path, prompts(100))
    assert result.exit_code == 130 and not engine.live
    assert f"interrupted: {len(records)} results are written" in result.stderr
    assert "--resume" in result.stderr


def test_a_dead_engine_is_1_and_shows_where(tmp_path: Path, engine: FakeEngine) -> None:
    def die(step: int) -> None:
        raise RuntimeError("device lost")

    engine._on_step = die
    result, records = run_file(tmp_path, prompts(100))
    assert result.exit_code == 1 and len(records) == 6
    assert "stopped early: RuntimeError: device lost" in result.stderr and "Traceback" in result.stderr


def test_ordered_with_created_repeats_byte_for_byte(tmp_path: Path, engine: FakeEngine) -> None:
    outputs = []
    for _ in range(2):
        engine.submitted.clear()
        result, _ = run_file(tmp_path, prompts(20), "--ordered", "--created", "17", "--overwrite")
        assert result.exit_code == 0
        outputs.append((tmp_path / "out.jsonl").read_bytes())
    assert outputs[0] == outputs[1] and b'"created": 17' in outputs[0]


def test_pipes(engine: FakeEngine) -> None:
    result = invoke("run", "-", "-o", "-", "--ordered", stdin=prompts(5))
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["custom_id"] for line in result.stdout.splitlines()] == [
        f"line-{n}" for n in range(1, 6)
    ]


def test_options_reach_the_engine_and_the_lines(tmp_path: Path, engine: FakeEngine) -> None:
    options = [
        "--model",
        str(tmp_path / "mine"),
        "--max-num-seqs",
        "3",
        "--max-model-len",
        "99",
        "--dtype",
        "float32",
        "--no-preemption",
        "--swap-space=0.5",
        "--quantum=8",
    ]
    result, records = run_file(
        tmp_path, prompts(1), *options, "--lag", "0", "--seed", "5", "--max-tokens", "101", "--created", "1"
    )
    assert engine.options == {  # type: ignore[attr-defined]
        "model": str(tmp_path / "mine"),
        "max_num_seqs": 3,
        "memory_utilization": 0.9,
        "speculative_config": None,
        "scheduling_policy": "priority",
        "quantum": 8,
        "priority_aging": 64,
        "max_num_batched_tokens": None,
        "preemption": False,
        "swap_space": 0.5,
        "max_model_len": 99,
        "dtype": "float32",
        "lag": 0,
        "seed": 5,
        "enable_prefix_caching": True,
        "num_blocks": None,
        "kv_cache_memory_bytes": None,
        "quantization": None,
        "attention_backend": "auto",
        "isa": "auto",
        "generation_config": "engine",
    }
    assert result.exit_code == 1 and records[0]["error"]["code"] == "token_limit_exceeded"
    _, records = run_file(tmp_path, b'{"prompt": "x"}', *options, "--overwrite")
    assert records[0]["response"]["body"]["model"] == "mine"


def test_results_are_never_replaced_unasked(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"{}\n" * 10**5)
    result, _ = run_file(tmp_path, prompts(2))
    assert_not_started(
        result, "out.jsonl has results already; --resume goes on with them, --overwrite replaces"
    )
    assert (tmp_path / "out.jsonl").stat().st_size == 3 * 10**5
    result, records = run_file(tmp_path, prompts(2), "--overwrite")
    assert result.exit_code == 0 and len(records) == 2  # and nothing of the longer file


def test_no_progress_prints_only_the_summary(tmp_path: Path, engine: FakeEngine) -> None:
    result, _ = run_file(tmp_path, prompts(2), "--no-progress")
    assert result.stderr.startswith("requests ")


def test_a_full_disk_is_1_with_one_message(tmp_path: Path, engine: FakeEngine) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompts(20))
    result = invoke("run", source, "-o", "/dev/full")
    assert result.exit_code == 1 and "cannot write /dev/full: No space left" in result.stderr
    assert "Traceback" not in result.stderr and not engine.live


@pytest.mark.parametrize("data", [b"", b"\n\n", b" \r\n\t\n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path: Path, engine: FakeEngine, data: bytes) -> None:
    result, _ = run_file(tmp_path, data)
    assert_not_started(result, "empty_file")
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_input(tmp_path: Path, engine: FakeEngine) -> None:
    assert_not_started(
        invoke("run", tmp_path / "none.jsonl", "-o", tmp_path / "out"), "none.jsonl: No such file"
    )
    assert_not_started(invoke("run", tmp_path, "-o", tmp_path / "out"), "Is a directory")


def test_unwritable_output(tmp_path: Path, engine: FakeEngine) -> None:
    for target in (tmp_path / "none" / "out.jsonl", tmp_path):
        (tmp_path / "in.jsonl").write_bytes(prompts(1))
        assert_not_started(invoke("run", tmp_path / "in.jsonl", "-o", target), str(target))


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_output_must_not_be_the_input(tmp_path: Path, engine: FakeEngine, link: Any) -> None:
    source = target = tmp_path / "in.jsonl"
    source.write_bytes(prompts(1))
    if link is not None:
        target = tmp_path / "out.jsonl"
        link(source, target)
    assert_not_started(invoke("run", source, "-o", target), "same file")
    assert source.read_bytes() == prompts(1)


def test_a_bad_model_leaves_old_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Any, *, show: bool) -> Any:
        raise CheckpointError("config.json: no such file")

    monkeypatch.setattr(cli._common, "load_engine", load)
    (tmp_path / "out.jsonl").write_bytes(b"precious")
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompts(1))
    result = invoke("run", source, "-o", tmp_path / "out.jsonl", "--overwrite")
    assert_not_started(result, "invalid_checkpoint: config.json: no such file")
    assert (tmp_path / "out.jsonl").read_bytes() == b"precious"
    assert_not_started(invoke("run", source, "-o", tmp_path / "new.jsonl"), "invalid_checkpoint")
    assert not (tmp_path / "new.jsonl").exists()


def test_ctrl_c_while_loading_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Any, *, show: bool) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._common, "load_engine", load)
    result, _ = run_file(tmp_path, prompts(1))
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--dtype", "int8"], "--dtype"),
        (["--lag", "2"], "--lag"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--max-line-bytes", "0"], "--max-line-bytes"),
        (["--what"], "--what"),
    ],
)
def test_bad_options(tmp_path: Path, engine: FakeEngine, options: list[str], message: str) -> None:
    result, _ = run_file(tmp_path, prompts(1), *options)
    assert_not_started(result, message)
    assert not (tmp_path / "out.jsonl").exists()


def test_graphs_is_a_table(engine: FakeEngine) -> None:
    report = SimpleNamespace(
        name="decode/256",
        shapes="B=16",
        lower_seconds=0.5,
        compile_seconds=1.25,
        temp_bytes=2**20,
        alias_bytes=3 * 2**20,
    )
    engine.inventory_report = lambda: [report]  # type: ignore[attr-defined]
    result = invoke("graphs")
    assert result.exit_code == 0, result.output
    header, row, total = result.stdout.splitlines()
    assert header.split() == [
        "program",
        "lower",
        "s",
        "compile",
        "s",
        "temp",
        "MiB",
        "alias",
        "MiB",
        "shapes",
    ]
    assert row.split() == ["decode/256", "0.50", "1.25", "1.00", "3.00", "B=16"]
    assert total.startswith("1 programs")


@pytest.mark.parametrize("command", [[], ["run"], ["graphs"], ["verify"]])
def test_help(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0 and "xla-engine" in result.stdout.removeprefix("Usage: xla-engine")


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0 and "0." in result.stdout


def test_help_does_not_wait_for_jax() -> None:
    code = (
        "import sys; from xla_engine.cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit(any(n in sys.modules for n in ('jax', 'numpy', 'tokenizers')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Complete a file of requests." in result.stdout


ATTACKS = {
    "invalid_json_line": [
        b'{"prompt": "broken',
        b'{"prompt": "x", "temperature": NaN}',
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


def test_attacks_get_error_lines_and_their_neighbours_the_same_bits(tmp_path: Path) -> None:
    """Every bad line of the list between good ones, through the real engine on the embedded model."""
    expected = [(code, raw) for code, raws in ATTACKS.items() for raw in raws]
    bad = [raw for _, raw in expected]
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(GOOD))
    (tmp_path / "all.jsonl").write_bytes(b"\n".join([*GOOD, *bad, GOOD[1]]))
    for name, status in (("good", 0), ("all", 1)):
        process = start("run", tmp_path / f"{name}.jsonl", "-o", tmp_path / f"{name}.out")
        _, stderr = process.communicate(timeout=240)
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


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """An interrupt once results have come: status 130, complete lines only."""
    lines = b'{"prompt": "def f(x):\\n", "ignore_eos": true, "max_tokens": 200}\n' * 2000
    (tmp_path / "in.jsonl").write_bytes(lines)
    out = tmp_path / "out.jsonl"
    # A shell may start its background jobs, this test among them, with SIGINT ignored.
    listen = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import xla_engine.__main__"
    )
    process = start("run", tmp_path / "in.jsonl", "-o", out, python=("-c", listen))
    deadline = time.monotonic() + 120
    while (
        not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr and b"interrupted: " in stderr and b"once more to stop" in stderr
    assert 0 < len(by_line(records_of(out))) < 2000
    assert b" 0 requests under way" in stderr  # the first interrupt let them finish


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    """As with `| head -1`: no traceback, no second message at exit."""
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "def f(x):\\n", "max_tokens": 3}\n' * 500)
    process = start("run", tmp_path / "in.jsonl", "-o", "-")
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 1, stderr
    assert json.loads(first)["error"] is None
    assert "Broken pipe" in stderr and "Traceback" not in stderr and "Exception ignored" not in stderr


def test_the_examples_are_good_lines_that_fit_the_embedded_model() -> None:
    """Sixty-four requests and more than there are slots, of many lengths, caps and settings."""
    from xla_engine.config import embedded_model_directory
    from xla_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(embedded_model_directory())
    for name, least in (("requests.jsonl", 72), ("openai_batch.jsonl", 5)):
        with open(ROOT / "examples" / name, "rb") as source:
            requests = [parse_line(line.raw or b"", line.number) for line in read_lines(source)]
        assert all(isinstance(request, LineRequest) for request in requests) and len(requests) >= least
        lengths = [len(tokenizer.encode(p) if isinstance(p, str) else p) for r in requests for p in r.prompts]
        assert max(n + r.params.max_tokens for n, r in zip(lengths, requests, strict=True)) < 512
        assert len({r.custom_id for r in requests}) == len(requests)
        assert len(set(lengths)) > least // 4 and len({r.params.max_tokens for r in requests}) > least // 4


@pytest.mark.slow
def test_the_example_of_more_requests_than_memory_runs(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths}
    example = ["bash", ROOT / "examples" / "more_requests_than_memory.sh", tmp_path / "results"]
    done = subprocess.run(example, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("same") == 5, "a run differs from the first"
    assert "tokens found" in done.stdout and "preemptions" in done.stdout
    assert (tmp_path / "results" / "steps.html").stat().st_size > 10_000


def test_flags_keep_their_old_names_unseen() -> None:
    for command, old, new in (
        ("run", "--record", "--step-log"),
        ("simulate", "--record", "--step-log"),
        ("simulate", "--pages", "--blocks / --no-blocks"),
    ):
        found = invoke(command, "--help").output
        assert new in found and old not in found
        options = cli.main.get_command(None, command).params  # type: ignore[arg-type, union-attr]
        assert any({old, new.split()[0]} <= set(option.opts) for option in options)
