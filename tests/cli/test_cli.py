"""The command line: what each command prints, writes and exits with."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from tests.support.batch_lines import by_line, interrupt_at, prompts
from tests.support.command_line import ROOT, assert_not_started, commands_use, invoke, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine import cli
from xla_engine.cli.run import run
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
    engine.on_step = interrupt_at(5)
    result, records = run_file(tmp_path, prompts(100))
    assert result.exit_code == 130 and not engine.live
    assert f"interrupted: {len(records)} results are written" in result.stderr
    assert "--resume" in result.stderr


def test_a_dead_engine_is_1_and_shows_where(tmp_path: Path, engine: FakeEngine) -> None:
    def die(step: int) -> None:
        raise RuntimeError("device lost")

    engine.on_step = die
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
        "--data-parallel-size=3",
        "--quantum=8",
        "--chunk-size=16",
        "--prefill-lanes=1, 4",
        "--block-size=128",
        "--runner=pooling",
        '--pooler-config={"pooling_type": "MEAN"}',
    ]
    (tmp_path / "mine").mkdir()
    result, records = run_file(
        tmp_path, prompts(1), *options, "--lag", "0", "--seed", "5", "--max-tokens", "101", "--created", "1"
    )
    assert engine.options.pop("files").path == tmp_path / "mine"  # type: ignore[attr-defined]
    assert engine.options == {  # type: ignore[attr-defined]
        "model": str(tmp_path / "mine"),
        "max_num_seqs": 3,
        "runner": "pooling",
        "pooler_config": {"pooling_type": "MEAN"},
        "hf_overrides": None,
        "enable_lora": False,
        "lora_modules": {},
        "max_loras": 1,
        "max_lora_rank": 16,
        "memory_utilization": 0.9,
        "speculative_config": None,
        "shadow_rate": 0.0,
        "scheduling_policy": "priority",
        "quantum": 8,
        "priority_aging": 64,
        "max_num_batched_tokens": None,
        "preemption": False,
        "swap_space": 0.5,
        "data_parallel_size": 3,
        "num_hosts": 1,
        "coordinator": None,
        "tensor_parallel_size": 1,
        "max_model_len": 99,
        "dtype": "float32",
        "lag": 0,
        "seed": 5,
        "enable_prefix_caching": True,
        "chunk_size": 16,
        "prefill_lanes": (1, 4),
        "block_size": 128,
        "num_blocks": None,
        "kv_cache_memory_bytes": None,
        "mamba_cache_mode": "none",
        "mamba_block_size": None,
        "mamba_cache_states": None,
        "prefix_cache_dir": None,
        "prefix_cache_bytes": 10 << 30,
        "image_cache_bytes": None,
        "allowed_local_media_path": None,
        "allowed_media_domains": (),
        "mm_processor_kwargs": None,
        "quantization": "auto",
        "kv_cache_dtype": "auto",
        "attention_backend": "auto",
        "bits": "machine",
        "isa": "auto",
        "generation_config": "model",
        "keep_finished": 0,
        "enable_dry": False,
        "phase_timers": False,
        "start_timeout_s": None,
        "step_timeout_s": None,
    }
    assert result.exit_code == 1 and records[0]["error"]["code"] == "token_limit_exceeded"
    _, records = run_file(tmp_path, b'{"prompt": "x"}', *options, "--overwrite")
    assert records[0]["response"]["body"]["model"] == "mine"


def test_results_are_never_replaced_unasked(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"{}\n" * 10**5)
    result, _ = run_file(tmp_path, prompts(2))
    assert_not_started(
        result, "out.jsonl already has results; use --resume to continue, or --overwrite to replace"
    )
    assert (tmp_path / "out.jsonl").stat().st_size == 3 * 10**5
    result, records = run_file(tmp_path, prompts(2), "--overwrite")
    assert result.exit_code == 0 and len(records) == 2  # and nothing of the longer file


def test_the_last_word_of_the_progress_is_that_all_is_done(tmp_path: Path, engine: FakeEngine) -> None:
    """Once, it stopped at 89 to 99 % above "79 ok", because the last redraw came before the last results."""
    result, _ = run_file(tmp_path, prompts(40))
    shown = [line for line in result.stderr.splitlines() if " requests, " in line]
    assert result.exit_code == 0 and shown[-1].startswith("40/40 requests"), result.stderr


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
    assert_not_started(invoke("run", tmp_path, "-o", tmp_path / "out"), "the directory has no table")


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
    def engine_for(options: Any) -> Any:
        raise CheckpointError("config.json: no such file")

    commands_use(monkeypatch, engine_for)
    (tmp_path / "out.jsonl").write_bytes(b"precious")
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompts(1))
    result = invoke("run", source, "-o", tmp_path / "out.jsonl", "--overwrite")
    assert_not_started(result, "invalid_checkpoint: config.json: no such file")
    assert (tmp_path / "out.jsonl").read_bytes() == b"precious"
    assert_not_started(invoke("run", source, "-o", tmp_path / "new.jsonl"), "invalid_checkpoint")
    assert not (tmp_path / "new.jsonl").exists()


def test_ctrl_c_while_loading_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_for(options: Any) -> Any:
        raise KeyboardInterrupt

    commands_use(monkeypatch, engine_for)
    result, _ = run_file(tmp_path, prompts(1))
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--dtype", "int8"], "--dtype"),
        (["--lag", "2"], "--lag"),
        (["--chunk-size", "7"], "--chunk-size"),
        (["--prefill-lanes", "2,x"], "--prefill-lanes"),
        (["--prefill-lanes", ""], "--prefill-lanes"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--max-line-bytes", "0"], "--max-line-bytes"),
        (["--override-generation-config", "5"], "give an object of sampling fields"),
        (["--override-generation-config", '{"topp": 1}'], "did you mean 'top_p'?"),
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


@pytest.mark.parametrize(
    ("name", "message"),
    [("serv", "No such command 'serv'; did you mean 'serve'?\n"), ("start", "No such command 'start'.\n")],
)
def test_an_unknown_command_gets_a_suggestion(name: str, message: str) -> None:
    result = invoke(name)
    assert result.exit_code == 2 and result.stderr.endswith(message)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_the_model_may_be_an_argument(tmp_path: Path, command: str) -> None:
    missing = str(tmp_path / "missing")
    for given in ([missing], ["--model", missing]):
        assert_not_started(invoke(command, *given), "missing: no such directory")
    assert_not_started(invoke(command, "a", "--model", "b"), "the model is given twice")


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    commands_use(monkeypatch, lambda _: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_not_started(
            invoke("serve", "--port", str(port)), f"cannot listen at 127.0.0.1:{port}: Address"
        )


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


def test_help_groups_the_options_of_engines_and_loses_none() -> None:
    text = invoke("run", "--help").stdout
    model, memory = text.index("\nModel:"), text.index("\nSlots and memory:")
    assert text.index("\nOptions:") < model < text.index("  --isa") < memory < text.index("  --num-blocks")
    for parameter in run.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.opts[0] in text
