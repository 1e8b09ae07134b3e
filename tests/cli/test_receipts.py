"""`xla-engine run --receipts`: resumed to the same bytes; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.batch_lines import interrupt_at, prompts
from tests.support.command_line import assert_not_started, invoke, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine.receipts import verify


@pytest.mark.parametrize("ordered", [False, True])
def test_an_interrupted_run_is_resumed_with_its_receipts(
    tmp_path: Path, engine: FakeEngine, ordered: bool
) -> None:
    receipts, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    options = ("--created", "17", *(["--ordered"] if ordered else []), "--receipts", str(receipts))
    lines = prompts(50) + b'{"promt": "y"}\n'
    engine.on_step = interrupt_at(5)
    result, _ = run_file(tmp_path, lines, *options)
    assert result.exit_code == 130
    assert "no root" in verify(out, receipts).rejected[0].why
    lost = receipts.read_bytes().splitlines(keepends=True)[-1].replace(b'"line": ', b'"line": 4')
    with open(receipts, "ab") as file:  # killed after a receipt, and in the next one
        file.write(lost + b'{"custom_id": "')
    engine.on_step = None
    result, _ = run_file(tmp_path, lines, *options, "--resume")
    assert result.exit_code == 1
    report = verify(out, receipts)
    assert report.ok, report.lines()
    assert (report.answers, report.errors) == (51, 1)
    resumed = receipts.read_bytes()
    run_file(tmp_path, lines, *options, "--resume")
    assert receipts.read_bytes() == resumed
    run_file(tmp_path, lines, *options, "--overwrite")
    whole = receipts.read_bytes()
    assert sorted(resumed.splitlines()[:-1]) == sorted(whole.splitlines()[:-1])
    assert not ordered or resumed == whole


def test_what_is_refused(tmp_path: Path, engine: FakeEngine) -> None:
    receipts = str(tmp_path / "r.jsonl")
    run_file(tmp_path, prompts(3))
    result, _ = run_file(tmp_path, prompts(3), "--receipts", receipts, "--resume")
    assert_not_started(result, "has receipts for 0 of the 3 answers")
    (tmp_path / "r.jsonl").write_text("kept\n")
    result, _ = run_file(tmp_path, prompts(3), "--receipts", receipts, "--resume")
    assert_not_started(result, "has another header")
    assert (tmp_path / "r.jsonl").read_text() == "kept\n"
    (tmp_path / "out.jsonl").unlink()
    result, _ = run_file(tmp_path, prompts(3), "--receipts", receipts)
    assert_not_started(result, "already has receipts")
    result, _ = run_file(tmp_path, prompts(3), "--receipts", f"{receipts}.gz")
    assert_not_started(result, "a plain file")
    result, _ = run_file(tmp_path, prompts(3), "--sign", "key.pem")
    assert_not_started(result, "add --receipts")


def test_receipts_that_cannot_be_read_are_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("")
    (tmp_path / "r.jsonl").write_text('{"prompt": "x"}\n')
    result = invoke("audit", tmp_path / "out.jsonl", "--receipts", tmp_path / "r.jsonl")
    assert_not_started(result, "not a file of receipts")
    result = invoke("audit", tmp_path / "out.jsonl", "--receipts", tmp_path / "none.jsonl")
    assert_not_started(result, "No such file")


@pytest.mark.parametrize("count", [20, 1])
def test_receipts_of_shards_are_merged(tmp_path: Path, engine: FakeEngine, count: int) -> None:
    shards = []
    for index in range(3):  # one of them may have none of the lines
        run_file(tmp_path, prompts(count), "--shard", f"{index}/3", "--receipts", str(tmp_path / f"r{index}"))
        shards.append(tmp_path / f"part{index}.jsonl")
        for end in ("", ".shard.json"):
            if (made := tmp_path / f"out.jsonl{end}").exists():
                made.rename(f"{shards[-1]}{end}")
    receipts = [each for index in range(3) for each in ("--receipts", tmp_path / f"r{index}")]
    target, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    result = invoke("merge", *shards, "-o", out, *receipts, "--receipts-output", target)
    assert result.exit_code == 0, result.output
    report = verify(out, target)
    assert report.ok and report.answers == count, report.lines()
    again = ("merge", *shards, "-o", out, "--overwrite")
    assert "go together" in invoke(*again, *receipts).stderr
    assert "2 files" in invoke(*again, *receipts[:4], "--receipts-output", target).stderr
    cut = next(path for path in (tmp_path / f"r{index}" for index in range(3)) if path.exists())
    cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:-1]))
    assert_not_started(invoke(*again, *receipts, "--receipts-output", target), "has no root")
