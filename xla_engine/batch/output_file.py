"""The file that a run writes results to: opened without changing it, locked, then continued or emptied."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from xla_engine.batch.resume import FinishedLines, Sink, is_packed
from xla_engine.errors import OutputError
from xla_engine.utils.file_lock import lock

CHECK_EVERY_S = 1.0  # how often a run checks that its file still exists


class Mode(Enum):
    """What a run does with existing results: refuse, overwrite, resume, or resume and rerun failed lines."""

    NEW = "new"
    OVERWRITE = "overwrite"
    RESUME = "resume"
    RETRY = "retry"


class OutputFile:
    """A result file, open from before the engine is loaded until after the last line.

    path: `-` is standard output; a name that ends in `.gz` is compressed. Until `begin`, the file changes in one
    way only: `claim` removes a torn end and, with `Mode.RETRY`, error lines. Afterwards it takes lines, and checks now
    and then, and when it is closed, that the file still exists with everything written to it. A new file that stays
    empty is removed. Raises OutputError and OSError.
    """

    def __init__(self, path: str, mode: Mode, *, check_every_s: float = CHECK_EVERY_S) -> None:
        self._mode = mode
        self._check_every_s = check_every_s
        self._sink: Sink | None = None
        self._path: Path | None = None
        if path == "-":
            if mode in (Mode.RESUME, Mode.RETRY):
                raise OutputError("standard output cannot be resumed; name a file with -o")
            self.file: BinaryIO = sys.stdout.buffer
            self._regular = False
            return
        self._path = Path(path)
        self._is_new = not os.path.lexists(path)
        self._open(self._path)

    def claim(self, done: FinishedLines) -> None:
        """Lock the file and, if the mode resumes, add its finished lines to `done`."""
        if self._path is None:
            return
        resumed = self._mode in (Mode.RESUME, Mode.RETRY)
        if not self._regular:
            if resumed:
                raise OutputError(f"{self._path} is not a regular file, so it cannot be resumed")
            return
        self._lock(self._path)
        if self._mode is Mode.NEW and os.fstat(self.file.fileno()).st_size:
            raise OutputError(
                f"{self._path} already has results; use --resume to continue, or --overwrite to replace them"
            )
        if not resumed:
            return
        path = self._path.resolve()
        done.read(path, drop_errors=self._mode is Mode.RETRY)
        # the file was rewritten without its error lines
        if not os.path.samestat(os.fstat(self.file.fileno()), path.stat()):
            self.file.close()
            self._open(path)
            self._lock(path)

    def begin(self) -> OutputFile:
        """Empty the file or seek to its end. Returns this object, to write lines to."""
        if self._regular and self._mode is Mode.OVERWRITE:
            os.ftruncate(self.file.fileno(), 0)
        if self._regular:
            self.file.seek(0, os.SEEK_END)
            self._start = os.fstat(self.file.fileno()).st_size
        packed = self._path is not None and is_packed(self._path)
        self._sink = Sink(self.file, packed=packed)
        self._next_check = time.monotonic() + self._check_every_s
        return self

    def write(self, data: bytes) -> None:
        """Write whole lines."""
        assert self._sink is not None
        self._sink.write(data)
        if time.monotonic() >= self._next_check:
            self._check(self._sink.written)
            self._next_check = time.monotonic() + self._check_every_s

    def close(self) -> None:
        """Flush and unlock the file. Idempotent."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
                self._check(sink.written)
            if self._path is not None:
                self.file.close()
        finally:
            self._give_back()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(OSError, OutputError):  # report the original error
            self.close()

    def _open(self, path: Path) -> None:
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), "wb")
        self._regular = stat.S_ISREG(os.fstat(self.file.fileno()).st_mode)

    def _lock(self, path: Path) -> None:
        """Lock the file until the process closes it or dies. Raises OutputError if another process has locked it."""
        try:
            locked = lock(self.file)
        except (ImportError, OSError):  # systems, and some network file systems, without such locks
            return
        if not locked:
            raise OutputError(f"{path} is being written by another process; wait for it or use another file")

    def _give_back(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            if self._is_new and self._path.stat().st_size == 0:
                self._path.unlink()

    def _check(self, written: int) -> None:
        """Raise OutputError unless the path still names this file, and it has the bytes written to it."""
        if self._path is None or not self._regular:
            return
        ours = os.fstat(self.file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            raise self._lost("was deleted") from None
        if not os.path.samestat(ours, there):
            raise self._lost("was replaced by another file")
        if ours.st_size != self._start + written:
            raise self._lost(f"was changed (it has {ours.st_size} bytes, not {self._start + written})")

    def _lost(self, how: str) -> OutputError:
        return OutputError(
            f"{self._path} {how} while this run wrote to it, so results are lost; let nothing else change it, and "
            "run again"
        )


def same_file(first: BinaryIO, second: BinaryIO) -> bool:
    """Whether two open files are the same regular file."""
    try:
        one, other = os.fstat(first.fileno()), os.fstat(second.fileno())
    except OSError:  # not a regular file
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, other)
