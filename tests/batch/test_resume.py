"""Resume result files that a killed run left: no result is lost or written twice; files of other runs are refused."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.batch_lines import HEADER, by_line, line_of, prompts
from tests.support.fake_engine import FakeEngine
from xla_engine.batch import resume as result_files
from xla_engine.batch.lines import Line, LineReader, read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.totals import RunTotals
from xla_engine.errors import OutputError, ResumeError
from xla_engine.utils import file_lock

ROOT = Path(__file__).parents[2]


def run(
    path: Path, data: bytes, mode: Mode = Mode.RESUME, engine: FakeEngine | None = None, **options: Any
) -> RunTotals:
    done = FinishedLines()
    with OutputFile(str(path), mode) as output:
        output.claim(done)
        lines = read_lines(io.BytesIO(data))
        batch = BatchRun(engine or FakeEngine(), lines, output.begin(), header=HEADER, done=done, **options)
        return batch.run()


def records(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return [json.loads(line) for line in raw.splitlines()]


@pytest.mark.full
def test_a_run_killed_at_any_moment_goes_on_to_the_same_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.kill_points", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and "DIFFERENT" not in done.stdout, done.stdout + done.stderr
    moments = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(moments) == 9 and sum(moments) > 200  # three to each write, two to each other operation


@pytest.mark.full
def test_the_kill_test_can_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.kill_points", str(tmp_path), "--plant"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.stdout.count("DIFFERENT") > 5, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_any_beginning_of_a_file_is_a_file_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(result_files, "MEMBER_BYTES", 900)
    path = tmp_path / name
    run(path, prompts(3) + b"{\n", Mode.NEW, ordered=True)
    whole, all_records = path.read_bytes(), records(path)
    counts = set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        done = FinishedLines()
        done.read(path)
        counts.add(len(done))
        assert records(path) == all_records[: len(done)]  # whole lines only, and all of them
        assert whole.startswith(path.read_bytes()) and (len(done) == 0) == (done.created is None)
    assert max(counts) == 4 and (len(counts) == 5 or name.endswith(".gz"))


def test_a_resumed_run_skips_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, prompts(5), Mode.NEW)
    before = path.read_bytes()
    engine = FakeEngine()
    totals = run(path, prompts(9), engine=engine)  # the input has grown
    assert (totals.resumed, totals.ok, len(engine.submitted)) == (5, 4, 4)
    assert path.read_bytes().startswith(before) and sorted(by_line(records(path))) == list(range(1, 10))
    assert run(path, prompts(9)).done == 0


def test_retry_runs_errors_again_and_only_them(tmp_path: Path) -> None:
    class Down(FakeEngine):
        def submit(self, prompt: Any, *arguments: Any, **options: Any) -> str:
            if prompt in ("p2", "p4"):
                raise RuntimeError("down")
            return super().submit(prompt, *arguments, **options)

    path = tmp_path / "out.jsonl"
    run(path, prompts(5), Mode.NEW, Down())
    assert run(path, prompts(5)).done == 0  # resume leaves errors
    engine = FakeEngine()
    totals = run(path, prompts(5), Mode.RETRY, engine)
    assert sorted(engine.submitted) == ["batch-2", "batch-4"] and (totals.resumed, totals.ok) == (3, 2)
    assert all(record["error"] is None for record in by_line(records(path)).values())
    assert len(records(path)) == 5 and list(tmp_path.iterdir()) == [path]


def test_ids_of_lines_that_are_done_stay_taken(tmp_path: Path) -> None:
    path, taken = tmp_path / "out.jsonl", b'{"prompt": "a", "custom_id": "x"}\n'
    run(path, taken, Mode.NEW)
    totals = run(path, taken * 2)
    assert totals.failed == {"duplicate_custom_id": 1} and totals.resumed == 1


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (prompts(4) + b'{"prompt": "other"}\n', {}, "line 5"),
        (b"\n" + prompts(5), {}, "line 2"),
        (prompts(5), {"defaults": {"max_tokens": 3}}, "line 1"),
        (prompts(4), {}, "of an input that was longer"),
    ],
)
def test_another_input_is_refused(tmp_path: Path, data: bytes, options: dict[str, Any], message: str) -> None:
    path = tmp_path / "out.jsonl"
    run(path, prompts(5), Mode.NEW)
    before = path.read_bytes()
    totals = run(path, data, **options)
    assert isinstance(totals.failure, ResumeError) and message in str(totals.failure)
    if message != "line 2":  # there an empty first line let line 6 in, which is new
        assert path.read_bytes() == before


def test_an_unordered_file_is_not_continued_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, prompts(6), Mode.NEW, ordered=True)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[3:]))
    totals = run(path, prompts(6), ordered=True)
    assert isinstance(totals.failure, ResumeError) and "--ordered" in str(totals.failure)
    assert [line_of(record) for record in records(path)] == [4, 5, 6]


@pytest.mark.parametrize(
    "foreign", [b"{}\n", b"precious\n", b"[1]\n", b'{"id": "batch_req_1", "response": 1, "error": null}\n']
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(ResumeError, match=r"out\.jsonl"):
        run(path, prompts(1))
    assert path.read_bytes() == foreign


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    run(path, prompts(20), Mode.NEW)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ResumeError, match="damaged"):
        run(path, prompts(20))
    path.write_bytes(b"no gzip file\n")
    with pytest.raises(ResumeError, match="damaged"):
        run(path, prompts(20))


def test_two_files_of_different_inputs_do_not_go_together(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run(one, prompts(2), Mode.NEW)
    run(other, b'{"prompt": "else"}\n', Mode.NEW)
    done = FinishedLines()
    done.read(one)
    with pytest.raises(ResumeError, match="two different inputs"):
        done.read(other)


def test_only_one_run_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "PATIENCE_S", 0)
    path = str(tmp_path / "out.jsonl")
    with OutputFile(path, Mode.NEW) as first:
        first.claim(FinishedLines())
        for mode in Mode:
            with pytest.raises(OutputError, match="another process"), OutputFile(path, mode) as second:
                second.claim(FinishedLines())
    with OutputFile(path, Mode.NEW) as third:
        third.claim(FinishedLines())
    assert not Path(path).exists()  # it stayed empty


def test_a_child_that_has_not_begun_its_program_locks_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compiler that a start asks for its version: until then it shares the locks of its parent."""
    path = str(tmp_path / "out.jsonl")
    with OutputFile(path, Mode.NEW) as first:
        first.claim(FinishedLines())
        first.begin().write(b"{}\n")
        command = [sys.executable, "-c", "input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[first.file.fileno()])
    waits: list[float] = []

    def begin_program(seconds: float) -> None:
        waits.append(seconds)
        child.communicate(b"\n")

    monkeypatch.setattr(file_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=begin_program))
    monkeypatch.setattr(file_lock, "PATIENCE_S", 600)
    with OutputFile(path, Mode.OVERWRITE) as second:
        second.claim(FinishedLines())
    assert len(waits) == 1


def test_standard_output_cannot_be_resumed() -> None:
    with pytest.raises(OutputError, match="standard output"):
        OutputFile("-", Mode.RESUME)


def test_each_line_is_the_systems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputFile(str(path), Mode.NEW) as output:
        output.claim(FinishedLines())
        sink = output.begin()
        for count in (1, 2):
            sink.write(b"x\n")
            assert path.read_bytes() == b"x\n" * count


def test_a_packed_file_is_one_gzip_file_of_few_members(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    run(path, prompts(1000), Mode.NEW)
    assert sorted(by_line(records(path))) == list(range(1, 1001))
    assert path.stat().st_size < 60_000 and path.read_bytes().count(b"\x1f\x8b\x08") < 10


@pytest.mark.full
def test_a_hash_that_was_met_before_is_no_second_use() -> None:
    """Of 96 bits 64 find the place, the others decide; a million ids of one line each do not meet."""
    reader = LineReader()
    for number in range(1, 20_001):
        raw = b'{"prompt": "x", "custom_id": "%d"}' % number
        assert reader.read(Line(number, len(raw), raw)).custom_id == str(number)
    again = b'{"prompt": "x", "custom_id": "77"}'
    error = reader.read(Line(20_001, len(again), again))
    assert "line 77" in error.message  # type: ignore[union-attr]


TORN = b'{"id": "batch_req_1_0123456789abcdef", "custom_id": "line-1", "resp'


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", [Mode.RESUME, Mode.RETRY])
@pytest.mark.parametrize(
    "foreign",
    [
        b"my notes, without a newline",
        b"my notes\nand more",
        b'{"id": "mine"}\n' + TORN,
        b'{"id": "cmpl-1", "response": {}, "error": null}\n' + TORN,
        b'{"prompt": "a request, not a result"}',
    ],
)
def test_a_file_that_holds_no_results_is_never_changed(
    tmp_path: Path, foreign: bytes, mode: Mode, packed: bool
) -> None:
    path = tmp_path / ("out.jsonl.gz" if packed else "out.jsonl")
    path.write_bytes(gzip.compress(foreign)[:-9] if packed else foreign)
    before = path.read_bytes()
    with pytest.raises(ResumeError, match=r"nothing was changed: name another file with -o"):
        run(path, prompts(1), mode)
    assert path.read_bytes() == before


@pytest.mark.parametrize("foreign", [b"no gzip", b"\x1f\x8b\x08 nor this"])
def test_a_file_that_is_only_named_gz_is_never_changed(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "out.jsonl.gz"
    path.write_bytes(foreign)
    with pytest.raises(ResumeError, match="damaged"):
        run(path, prompts(1))
    assert path.read_bytes() == foreign


def test_results_before_what_is_no_result_do_not_let_it_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, prompts(3), Mode.NEW)
    for tail in (b"a line of mine\n" + TORN, b"mine, to the end"):
        path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n" + tail)
        before = path.read_bytes()
        with pytest.raises(ResumeError, match="nothing was changed"):
            run(path, prompts(3))
        assert path.read_bytes() == before


@pytest.mark.parametrize("response", ["1", "{}", '{"body": 1}', '{"body": {"created": 1}}', "null"])
def test_a_result_made_by_hand_is_refused(tmp_path: Path, response: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(
        f'{{"id": "batch_req_1_0123456789abcdef", "custom_id": "a", "response": {response}, "error": null}}\n'
    )
    with pytest.raises(ResumeError, match="no body"):
        run(path, prompts(1))
