"""An output that is taken away while a run writes ends the run with the reason; helper files follow no link."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.batch_lines import HEADER, prompts
from tests.support.fake_engine import FakeEngine
from xla_engine.batch.lines import read_lines
from xla_engine.batch.output_file import CHECK_EVERY_S, Mode, OutputFile
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.errors import OutputError
from xla_engine.utils.new_file import open_new


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def add_to(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"another's line\n")


HARMS: list[tuple[Callable[[Path], None], str]] = [
    (Path.unlink, "deleted"),
    (truncate, "changed"),
    (replace, "replaced"),
    (add_to, "changed"),
]


def harmed_run(
    path: Path,
    mode: Mode,
    engine: FakeEngine,
    harm: Callable[[Path], None],
    after: int,
    *,
    check_every_s: float = CHECK_EVERY_S,
) -> None:
    """A run of 200 lines whose output file is damaged after the given number of lines."""
    harmed = False
    with OutputFile(str(path), mode, check_every_s=check_every_s) as output:
        output.claim(FinishedLines())

        def on_turn() -> None:
            nonlocal harmed
            if not harmed and batch.totals.written >= after:
                harmed = True
                harm(path)

        lines = read_lines(io.BytesIO(prompts(200)))
        batch = BatchRun(engine, lines, output.begin(), header=HEADER, on_turn=on_turn)
        batch.run()
    assert harmed


@pytest.mark.parametrize(("harm", "message"), HARMS)
@pytest.mark.parametrize("mode", [Mode.NEW, Mode.OVERWRITE, Mode.RESUME])
def test_a_file_taken_away_is_seen_at_the_end(
    tmp_path: Path, harm: Callable[[Path], None], message: str, mode: Mode
) -> None:
    """Runs reported success, with status 0."""
    with pytest.raises(OutputError, match=f"out.jsonl was {message}"):
        harmed_run(tmp_path / "out.jsonl", mode, FakeEngine(), harm, 100, check_every_s=1e9)


@pytest.mark.parametrize(("harm", "message"), [each for each in HARMS if each[0] is not truncate])
def test_a_packed_file_taken_away_is_seen_at_the_end(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(OutputError, match=f"out.jsonl.gz was {message}"):
        harmed_run(tmp_path / "out.jsonl.gz", Mode.NEW, FakeEngine(), harm, 100)


@pytest.mark.parametrize(("harm", "message"), HARMS)
def test_a_file_taken_away_ends_the_run(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    """The run looks now and then, here at each line; it does not compute thousands of lines for nothing."""
    engine = FakeEngine()
    with pytest.raises(OutputError, match=message):
        harmed_run(tmp_path / "out.jsonl", Mode.NEW, engine, harm, 1, check_every_s=0.0)
    assert len(engine.submitted) < 200


def test_an_output_that_is_left_alone_is_as_before(tmp_path: Path) -> None:
    """Also through a link, and when a run resumes an existing file."""
    path = tmp_path / "link.jsonl"
    path.symlink_to("out.jsonl")
    for mode in (Mode.NEW, Mode.RESUME, Mode.OVERWRITE, Mode.RETRY):
        done = FinishedLines()
        with OutputFile(str(path), mode, check_every_s=0.0) as output:
            output.claim(done)
            lines = read_lines(io.BytesIO(prompts(6)))
            BatchRun(FakeEngine(), lines, output.begin(), header=HEADER, done=done).run()
        assert len(path.read_text().splitlines()) == 6 and path.is_symlink()


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """`--retry-failed` wrote through `.OUT.kept`, wherever it led."""
    victim, path = tmp_path / "victim", tmp_path / "out.jsonl"
    victim.write_text("precious")
    data = prompts(3).replace(b"}", b', "temperature": -1}', 1)  # an error line
    with OutputFile(str(path), Mode.NEW) as output:
        output.claim(FinishedLines())
        BatchRun(FakeEngine(), read_lines(io.BytesIO(data)), output.begin(), header=HEADER).run()
    assert any(json.loads(line)["error"] for line in path.read_text().splitlines())
    path.chmod(0o600)
    (tmp_path / ".out.jsonl.kept").symlink_to(victim)
    with OutputFile(str(path), Mode.RETRY) as output:
        output.claim(done := FinishedLines())
    assert len(done) == 2 and victim.read_text() == "precious"
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().splitlines()) == 2


def test_a_name_taken_again_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new"
    target.symlink_to("elsewhere")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as if it were put there again at once
    with pytest.raises(OSError, match="exists"):
        open_new(target)
