"""`xla-engine run` and its files: resume, error files, gzip, dry run, status file, stream."""

from __future__ import annotations

import gzip
import io
import json
import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_lines import by_line, interrupt_at, prompts
from tests.support.command_line import ROOT, assert_not_started, invoke, records_of, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine.batch.earlier_runs import LastRun
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.cli import _run as cli_run
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import embedded_model_directory, native_cache_directory
from xla_engine.openai.results import ResultHeader
from xla_engine.runner.native_library.cache import private_directory

DRY = ("--dry-run", "--max-model-len", "64")


def test_an_interrupted_run_is_resumed(tmp_path: Path, engine: FakeEngine) -> None:
    engine.on_step = interrupt_at(5)
    result, first = run_file(tmp_path, prompts(50), "--created", "17")
    assert result.exit_code == 130 and 0 < len(first) < 50
    engine.on_step = None
    engine.submitted.clear()
    result, both = run_file(tmp_path, prompts(50), "--resume")
    assert result.exit_code == 0 and f"{len(first)} done before" in result.stderr
    assert both[: len(first)] == first and sorted(by_line(both)) == list(range(1, 51))
    assert {record["response"]["body"]["created"] for record in both} == {17}  # as the first run said
    result, again = run_file(tmp_path, prompts(50), "--resume")
    assert result.exit_code == 0 and again == both and len(engine.submitted) == 50 - len(first)


def test_another_engine_does_not_go_on(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file(tmp_path, prompts(3))
    other = EngineIdentity(model="other", dtype="none", config={"lag": 0, "seed": 7}, platform={})
    engine.made_as = other
    with monkeypatch.context() as patch:
        result, records = run_file(tmp_path, prompts(5), "--resume")
        every = "model: fake and other; engine option lag: absent and 0; engine option seed: absent and 7"
        assert_not_started(result, f"then and now, {every}. Resume with the same")
        assert len(records) == 3
        patch.setattr(cli_run, "recall", lambda digest: None)
        assert_not_started(run_file(tmp_path, prompts(5), "--resume")[0], "it did not run on this machine")


def test_a_file_of_another_kind_of_machine_says_what_differs(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache is on the other machine; here there is only the digest in the results."""
    native = {"jax": "0.12", "attention": "native", "linear": "native", "isa": "avx2"}

    def identity(length: int, **platform: str) -> EngineIdentity:
        return EngineIdentity(
            model="m", dtype="none", config={"max_model_len": length}, platform=native | platform
        )

    tiles = identity(8192)
    tiles = replace(tiles, platform={name: word for name, word in native.items() if name != "isa"})
    monkeypatch.setattr(cli_run, "recall", lambda digest: None)
    for there, differences in (
        (identity(8192, isa="avx512"), "isa: avx512 and avx2"),
        (
            identity(4096, isa="avx512_bf16"),
            "isa: avx512_bf16 and avx2; engine option max_model_len: 4096 and 8192",
        ),
        (tiles, "isa: absent and avx2"),
    ):
        engine.made_as = there
        run_file(tmp_path, prompts(3), "--overwrite")
        engine.made_as = identity(8192)
        result, _ = run_file(tmp_path, prompts(5), "--resume")
        assert_not_started(result, f"on another machine and here, {differences}. Resume with the same")
    engine.made_as = identity(8192, jax="0.11")
    result, _ = run_file(tmp_path, prompts(5), "--resume")
    assert_not_started(result, "it did not run on this machine: jax 0.11, attention native")


def test_a_resumed_run_takes_the_recorded_length(tmp_path: Path, engine: FakeEngine) -> None:
    """Once, the default was different when less memory was free, and then nothing could be resumed."""

    def identity() -> EngineIdentity:
        length = engine.options["max_model_len"] or engine.default_length  # type: ignore[attr-defined]
        return EngineIdentity(model="m", dtype="none", config={"max_model_len": length}, platform={})

    engine.identity = identity  # type: ignore[method-assign]
    engine.default_length = 8192  # type: ignore[attr-defined]
    run_file(tmp_path, prompts(3))
    engine.default_length = 4096  # type: ignore[attr-defined]
    result, records = run_file(tmp_path, prompts(5), "--resume")
    assert result.exit_code == 0 and len(records) == 5
    result, _ = run_file(tmp_path, prompts(6), "--resume", "--max-model-len", "4096")
    assert_not_started(result, "then and now, engine option max_model_len: 8192 and 4096. Resume")


def test_error_file_and_retry(tmp_path: Path, engine: FakeEngine) -> None:
    errors = tmp_path / "errors.jsonl"
    data = prompts(3) + b'{"prompt": "no!"}\n'
    result, records = run_file(tmp_path, data, "--errors", str(errors))
    assert result.exit_code == 1 and len(records) == 3
    (error,) = records_of(errors)
    assert error["error"]["line"] == 4 and "in " + str(errors) not in result.stdout
    engine.submitted.clear()
    result, records = run_file(tmp_path, data, "--errors", str(errors), "--retry-failed")
    assert result.exit_code == 1 and len(records) == 3 and len(records_of(errors)) == 1
    assert "1: 0 ok, 1 failed (invalid_request 1); 3 done before" in result.stderr
    assert_not_started(run_file(tmp_path, data, "--retry-failed", "--ordered")[0], "--ordered")


def test_an_output_deleted_meanwhile_is_a_failure(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the run printed "20 ok" and had status 0."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(prompts(20))
    real = BatchRun.run

    def then_delete(batch: BatchRun) -> Any:
        totals = real(batch)
        target.unlink()
        return totals

    monkeypatch.setattr(BatchRun, "run", then_delete)
    result = invoke("run", source, "-o", target)
    assert result.exit_code == 1 and f"{target} was deleted" in result.stderr and "20 ok" not in result.stderr


def test_packed_in_and_out(tmp_path: Path, engine: FakeEngine) -> None:
    source, target = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    source.write_bytes(gzip.compress(prompts(20)[:80]) + gzip.compress(prompts(20)[80:]))
    result = invoke("run", source, "-o", target, "--ordered")
    assert result.exit_code == 0, result.output
    lines = gzip.decompress(target.read_bytes()).splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"line-{n}" for n in range(1, 21)]


@pytest.mark.parametrize("cut", [1, 30])
def test_a_damaged_packed_input_ends_with_what_was_read(tmp_path: Path, engine: FakeEngine, cut: int) -> None:
    source, target = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress(prompts(20)) + gzip.compress(prompts(20))[:-cut])
    result = invoke("run", source, "-o", target)
    assert result.exit_code == 1 and "damaged gzip file" in result.stderr and len(records_of(target)) >= 20


def test_files_must_differ(tmp_path: Path, engine: FakeEngine) -> None:
    out = str(tmp_path / "out.jsonl")
    assert_not_started(run_file(tmp_path, prompts(1), "--errors", out)[0], "same file")
    assert_not_started(run_file(tmp_path, prompts(1), "--errors", str(tmp_path / "in.jsonl"))[0], "same file")


def test_status_file(tmp_path: Path, engine: FakeEngine) -> None:
    path = tmp_path / "status.json"
    result, _ = run_file(tmp_path, prompts(9) + b"{\n", "--status-file", str(path))
    assert result.exit_code == 1
    status = json.loads(path.read_text())
    assert status["run"]["ok"] == 9 and status["run"]["failed"] == {"invalid_json_line": 1}
    assert len(status["slots"]) == engine.max_num_seqs and not status["run"]["draining"]
    result, _ = run_file(
        tmp_path, prompts(1), "--overwrite", "--status-file", str(tmp_path / "no" / "s.json")
    )
    assert_not_started(result, "No such file")


@pytest.mark.parametrize(
    "options", [("--resume", "--overwrite"), ("--dry-run", "--stream"), ("--resume", "--retry-failed")]
)
def test_options_that_exclude_each_other(
    tmp_path: Path, engine: FakeEngine, options: tuple[str, ...]
) -> None:
    assert_not_started(run_file(tmp_path, prompts(1), *options)[0], "exclude each other")


def test_what_must_be_named(engine: FakeEngine) -> None:
    assert_not_started(invoke("run"), "Missing argument 'INPUT'")
    assert_not_started(invoke("run", "-", stdin=b""), "Missing option '-o'")


def test_a_dry_run_finds_every_bad_line(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "def f(x):", "max_tokens": 4}',
        b"{",
        b'{"prompt": [1, 2, 3], "max_tokens": 10}',
        b'{"prompt": "x", "custom_id": "line-1"}',
        b'{"prompt": "x", "max_tokens": 64}',
        b'{"prompt": [99999]}',
        b'{"prompt": "x", "stop_token_ids": [99999]}',
        b'{"messages": [{"role": "user", "content": "Hello"}]}',
        b'{"url": "/v1/completions", "body": {"prompt": ["x", "y"], "max_tokens": 2}}',
        b'{"prompt": "x", "cache_salt": 7}',
        b'{"prompt": "x", "cache_salt": "tenant", "max_tokens": 2}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('no chats') }}")
    result = invoke("run", source, *DRY, "--chat-template", template)
    assert result.exit_code == 1, result.output
    errors = [line.split(":")[:2] for line in result.stdout.splitlines() if line.startswith("line ")]
    assert errors == [
        ["line 2", " invalid_json_line"],
        ["line 4", " duplicate_custom_id"],
        ["line 5", " token_limit_exceeded"],
        ["line 6", " invalid_request"],
        ["line 7", " invalid_request"],
        ["line 8", " chat_template_error"],
        ["line 10", " invalid_request"],
    ]
    assert "11: 4 ok, 7 would fail" in result.stdout and "20 at most" in result.stdout


def test_a_chat_template_of_ones_own(tmp_path: Path) -> None:
    """It goes before the model's."""
    chat = b'{"messages": [{"role": "user", "content": "abc"}]}'
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}# {{ each.content }}\n{% endfor %}")
    result = invoke("run", "-", *DRY, "--chat-template", template, stdin=chat)
    assert result.exit_code == 0 and "1 ok" in result.stdout
    plain = invoke("run", "-", *DRY, stdin=b'{"prompt": "# abc\\n"}').stdout
    counted = [line for line in result.stdout.splitlines() if line.startswith("prompt tokens")]
    assert counted == [line for line in plain.splitlines() if line.startswith("prompt tokens")]
    template.write_bytes(b"\xff")
    assert_not_started(invoke("run", "-", *DRY, "--chat-template", template, stdin=chat), "not text in UTF-8")
    result = invoke("run", "-", *DRY, "--chat-template", tmp_path / "none", stdin=chat)
    assert_not_started(result, "none: No such file")


def test_results_of_another_template_are_not_gone_on_with(tmp_path: Path, engine: FakeEngine) -> None:
    template = tmp_path / "template.jinja"
    for text, status in (("first", 0), ("second", 1)):
        template.write_text(text)
        result, _ = run_file(tmp_path, prompts(3), "--resume", "--chat-template", str(template))
        assert result.exit_code == status, result.stderr
    assert "differ from those of the output" in result.stderr


def test_a_dry_run_counts_what_a_run_counts(tmp_path: Path) -> None:
    example = ROOT / "examples" / "requests.jsonl"
    result = invoke("run", example, "--dry-run")
    assert result.exit_code == 0 and "codes                none" in result.stdout
    assert_not_started(invoke("run", tmp_path / "none.jsonl", "--dry-run"), "none.jsonl: No such file")
    assert "empty_file" in invoke("run", "-", "--dry-run", stdin=b"\n").stderr


# A shell may start its background jobs, a test among them, with SIGINT ignored.
RUN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import xla_engine.__main__"


def start(*arguments: str, program: str = RUN) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def events_until(process: subprocess.Popen[bytes], event: str) -> list[dict[str, Any]]:
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    while not events or events[-1]["event"] != event:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read().decode()
        events.append(json.loads(line))
    return events


@pytest.mark.full
def test_a_stream_is_driven_and_interrupted_in_its_own_process(tmp_path: Path) -> None:
    """Send requests one at a time, cancel a long one, then press Ctrl-C while the input is still open."""
    status = tmp_path / "status.json"
    process = start("run", "--stream", "--max-num-seqs", "8", "--status-file", str(status))
    assert process.stdin is not None and process.stderr is not None and process.stdout is not None
    process.stdin.write(b'{"id": "a", "prompt": "def f(", "max_tokens": 3, "ignore_eos": true}\n')
    process.stdin.flush()
    events = events_until(process, "finish")
    assert sum(len(event.get("token_ids", ())) for event in events) == 3
    process.stdin.write(b'{"id": "b", "prompt": "def f(", "max_tokens": 450, "ignore_eos": true}\n')
    process.stdin.flush()
    events_until(process, "delta")
    process.stdin.write(b'{"op": "cancel", "id": "b"}\n')
    process.stdin.flush()
    assert events_until(process, "finish")[-1]["finish_reasons"] in (["abort"], ["length"])
    process.send_signal(signal.SIGINT)
    assert events_until(process, "end")[-1]["requests"] == 2
    stderr = process.stderr.read()
    assert process.wait(timeout=1800) == 130, stderr
    assert b"Traceback" not in stderr and b"Fatal" not in stderr
    assert json.loads(status.read_text())["run"]["ok"] == 2
    for file in (process.stdin, process.stdout, process.stderr):
        file.close()


# `xla-engine run` that kills itself once its file has 3,000 bytes.
RUN_AND_END = """
import os, signal
from xla_engine.batch.output_file import OutputFile
from xla_engine.cli import main

write = OutputFile.write

def write_and_end(sink, data):
    write(sink, data)
    if os.fstat(sink.file.fileno()).st_size > 3000:
        os.kill(os.getpid(), signal.SIGKILL)

OutputFile.write = write_and_end
main(prog_name="xla-engine")
"""


@pytest.mark.full
def test_a_run_that_is_killed_is_resumed_by_the_real_engine(tmp_path: Path, embedded: XlaBatchEngine) -> None:
    """SIGKILL in the middle; the resumed ordered file has the bytes of a run that was left alone."""
    lines = b"".join(b'{"prompt": "def f%d(", "max_tokens": 30, "logprobs": 0}\n' % n for n in range(120))
    (tmp_path / "in.jsonl").write_bytes(lines)
    out = tmp_path / "out.jsonl"
    command = ("run", str(tmp_path / "in.jsonl"), "--ordered", "--created", "7", "-o", str(out))
    killed = start(*command, program=RUN_AND_END)
    _, stderr = killed.communicate(timeout=1800)
    assert killed.returncode == -signal.SIGKILL, stderr.decode()
    assert 0 < out.read_bytes().count(b"\n") < 120
    again = start(*command, "--resume")
    _, stderr = again.communicate(timeout=1800)
    assert again.returncode == 0, stderr.decode()
    header = ResultHeader(
        created=7,
        model="embedded",
        system_fingerprint=embedded.identity().digest(),
        tokenizer=embedded.tokenizer,
    )
    whole = io.BytesIO()
    BatchRun(embedded, read_lines(io.BytesIO(lines)), whole, header=header, ordered=True).run()
    assert out.read_bytes() == whole.getvalue()


def test_metrics_are_written_beside_the_status(tmp_path: Path, engine: FakeEngine) -> None:
    metrics, status = tmp_path / "m.prom", tmp_path / "s.json"
    result, _ = run_file(tmp_path, prompts(5), "--metrics-file", str(metrics), "--status-file", str(status))
    assert result.exit_code == 0
    text, stats = metrics.read_text(), json.loads(status.read_text())["stats"]
    assert (
        f'vllm:request_success_total{{model_name="fake",finished_reason="length"}} {stats["finished"]["length"]}'
        in text
    )
    assert stats["distributions"]["inter_token_seconds"]["counts"] and stats["phases"] is None
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    result, _ = run_file(
        tmp_path, prompts(5), "--overwrite", "--metrics-file", str(tmp_path / "none" / "m.prom")
    )
    assert_not_started(result, "none")


def test_phase_timers_are_an_option_of_the_engine(tmp_path: Path, engine: FakeEngine) -> None:
    run_file(tmp_path, prompts(2), "--phase-timers")
    assert engine.options["phase_timers"] is True  # type: ignore[attr-defined]
    run_file(tmp_path, prompts(2), "--overwrite")
    assert engine.options["phase_timers"] is False  # type: ignore[attr-defined]


def test_verbose_shows_the_log_of_the_command_and_no_longer(tmp_path: Path, engine: FakeEngine) -> None:
    log = logging.getLogger("xla_engine.engine")

    def say(step: int) -> None:
        if step == 1:
            log.info("a line")

    engine.on_step = say
    before = logging.getLogger("xla_engine").handlers[:]
    for options, shown in ((("-v", "--overwrite"), 1), (("--overwrite",), 0)):
        engine.steps = 0
        result, _ = run_file(tmp_path, prompts(2), *options)
        assert result.exit_code == 0 and result.stderr.count("INFO xla_engine.engine: a line") == shown
    assert logging.getLogger("xla_engine").handlers == before


def test_a_dry_run_estimates_from_the_last_run(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = private_directory(native_cache_directory())
    monkeypatch.setenv("XLA_ENGINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / native.name).symlink_to(native)  # `inspect` would compile every kernel again
    data = b"".join(b'{"prompt": "def f", "max_tokens": %d}\n' % n for n in (1, 40) * 10)
    (tmp_path / "in.jsonl").write_bytes(data)
    told = invoke("run", tmp_path / "in.jsonl", *DRY).stdout
    assert "new tokens           410 at most\n" in told and "unknown until this model has run" in told
    run_file(tmp_path, data)  # two tokens each, by this engine
    told = invoke("run", tmp_path / "in.jsonl", *DRY).stdout
    assert "new tokens           410 at most; about 30 if answers are as long as in the last run (2)" in told
    assert "time                 about 0 s at " in told and " tok/s, as in the run of 20" in told
    assert "1,000 answers of 2 tokens, as the last run's were: about " in invoke("inspect").stdout
    assert json.loads(invoke("inspect", "--json").stdout)["last_run"]["generated_tokens"] == 40
    last = LastRun.of(embedded_model_directory())
    assert last is not None and (last.answers, last.generated_tokens) == (20, 40)
    # too few to say anything
    LastRun(answers=15, generated_tokens=9, seconds=1.0).keep(embedded_model_directory())
    assert LastRun.of(embedded_model_directory()) == last
