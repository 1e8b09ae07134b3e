"""Kill a batch run at every operation that changes a file, go on, and compare with a run that was left alone.

Run as a program, so that it can fork without jax's threads: `python -m tests.support.kill_points DIRECTORY` prints,
for each way of running, how many points there were, and every difference as a line that begins with DIFFERENT.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.batch_lines import HEADER
from tests.support.fake_engine import FakeEngine
from xla_engine.batch import resume as result_files
from xla_engine.batch.lines import read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.resume import FinishedLines, Sink
from xla_engine.batch.run import BatchRun

LINES = b"".join(
    b'{"prompt": "p%d", "max_tokens": %d}\n' % (number, 200 if number % 5 == 0 else 2)
    for number in range(1, 13)
)


class Killer:
    """Kills this process at the n-th of all moments: before and after each operation that changes a file, and in the
    middle of a write."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def install(self) -> None:
        append = Sink._append

        def in_halves(sink: Sink, data: bytes) -> None:
            self._pass()
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                append(sink, part)
                self._pass()

        setattr(Sink, "_append", in_halves)  # noqa: B010, mypy knows no other way
        for name in ("ftruncate", "replace"):
            setattr(os, name, self._between_moments(getattr(os, name)))

    def _between_moments(self, change: Callable[..., None]) -> Callable[..., None]:
        def changed(*arguments: Any) -> None:
            self._pass()
            change(*arguments)
            self._pass()

        return changed

    def _pass(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


class FlakyEngine(FakeEngine):
    """Fails the requests of two lines at their submission."""

    def submit(self, prompt: Any, *arguments: Any, **options: Any) -> str:
        if prompt in ("p3", "p8"):
            raise RuntimeError("not today")
        return super().submit(prompt, *arguments, **options)


@dataclass(frozen=True)
class Way:
    """One way of running: file names, and whether the last run retries what a flaky engine failed."""

    output: str = "out.jsonl"
    errors: str | None = None
    ordered: bool = False
    retry: bool = False

    def run(self, folder: Path, mode: Mode, *, flaky: bool = False, seed: int = 0) -> None:
        done = FinishedLines()
        with contextlib.ExitStack() as stack:
            names = [name for name in (self.output, self.errors) if name is not None]
            outputs = [stack.enter_context(OutputFile(str(folder / name), mode)) for name in names]
            for output in outputs:
                output.claim(done)
            sinks = [output.begin() for output in outputs]
            source = stack.enter_context(open(folder / "in.jsonl", "rb"))
            engine = FlakyEngine(seed=seed) if flaky else FakeEngine(seed=seed)
            totals = BatchRun(
                engine,
                read_lines(source),
                sinks[0],
                errors=sinks[-1],
                header=HEADER,
                ordered=self.ordered,
                done=done,
            ).run()
            assert totals.failure is None, totals.failure

    def first(self, folder: Path, seed: int) -> None:
        """The run that is killed, when it is not the retry."""
        self.run(folder, Mode.NEW, seed=seed)

    def again(self, folder: Path, seed: int) -> None:
        self.run(folder, Mode.RETRY if self.retry else Mode.RESUME, seed=seed)

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "in.jsonl").write_bytes(LINES)
        if self.retry:
            self.run(folder, Mode.NEW, flaky=True)

    def results(self, folder: Path) -> list[list[bytes]]:
        files = []
        for name in (self.output, self.errors):
            if name is not None:
                raw = (folder / name).read_bytes()
                lines = (gzip.decompress(raw) if name.endswith(".gz") else raw).splitlines(keepends=True)
                files.append([raw] if self.ordered else sorted(lines))
        return files


def survives(work: Any, *arguments: Any, kill_at: int | None = None) -> bool:
    """Whether `work` finishes in a process of its own, neither killed nor failed. kill_at: the moment of its death."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(Exception):
            if kill_at is not None:
                Killer(kill_at).install()
            work(*arguments)
            status = 0
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    return os.WEXITSTATUS(status) == 0


def check(way: Way, folder: Path) -> int:
    """Number of moments at which the run was killed."""
    way.prepare(folder / "whole")
    begin = way.again if way.retry else way.first
    begin(folder / "whole", 0)
    expected = way.results(folder / "whole")
    for moment in itertools.count():
        place = folder / f"{moment}"
        way.prepare(place)
        if survives(begin, place, moment, kill_at=moment):
            return moment
        # it is killed while it goes on, too
        survives(way.again, place, moment + 1, kill_at=moment % 7)
        if not survives(way.again, place, moment + 2) or way.results(place) != expected:
            print(f"DIFFERENT {way} killed at moment {moment}")


def main() -> None:
    # A killed process loses nothing that was written; only a machine without power does.
    setattr(os, "fsync", lambda _: None)  # noqa: B010
    result_files.MEMBER_BYTES = 700  # a few lines, so that there are several members
    ways = {
        "plain": Way(),
        "ordered": Way(ordered=True),
        "errors": Way(errors="errors.jsonl"),
        "ordered, errors": Way(errors="errors.jsonl", ordered=True),
        "packed": Way(output="out.jsonl.gz"),
        "packed, ordered, errors": Way(output="out.jsonl.gz", errors="errors.jsonl", ordered=True),
        "retry": Way(retry=True),
        "retry, errors": Way(errors="errors.jsonl", retry=True),
        "retry, packed": Way(output="out.jsonl.gz", retry=True),
    }
    planted = "--plant" in sys.argv  # a fault that must be found: torn ends stay
    if planted:
        result_files.cut_torn_end = lambda path, end: None
    for number, (name, way) in enumerate(list(ways.items())[: 1 if planted else None]):
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir()
        print(f"{check(way, folder)} moments: {name}")


if __name__ == "__main__":
    main()
