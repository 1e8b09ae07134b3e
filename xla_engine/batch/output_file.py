"""One file that a run writes results to: opened without harm to what is in it, locked, continued or begun."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from xla_engine.batch.resume import CountedSink, FileSystem, FinishedLines, Sink, is_packed, sink_of
from xla_engine.errors import OutputError

CHECK_EVERY_S = 1.0  # how often a run looks whether its file is still there


class Mode(Enum):
    """What a run does with results that are there: refuse, replace them, go on, go on and run failed lines again."""

    NEW = "new"
    OVERWRITE = "overwrite"
    RESUME = "resume"
    RETRY = "retry"


class OutputFile:
    """A result file, open from before the engine is loaded until after the last line.

    path: `-` is standard output; a name that ends in `.gz` packs. Nothing in the file changes before `begin`, but
    for a torn end and, with `Mode.RETRY`, error lines: `claim` takes these out of a file of results. A new file that
    stays empty is removed. Raises OutputError and OSError.
    """

    def __init__(self, path: str, mode: Mode, file_system: FileSystem | None = None) -> None:
        self._mode = mode
        self._file_system = file_system or FileSystem()
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
        """Lock the file, and add to `done` what it says is done where the mode asks for it."""
        if self._path is None:
            return
        resumed = self._mode in (Mode.RESUME, Mode.RETRY)
        if not self._regular:
            if resumed:
                raise OutputError(f"{self._path} is no plain file, so it cannot be resumed")
            return
        self._lock(self._path)
        if self._mode is Mode.NEW and os.fstat(self.file.fileno()).st_size:
            raise OutputError(
                f"{self._path} has results already; --resume goes on with them, --overwrite replaces them"
            )
        if not resumed:
            return
        path = self._path.resolve()
        done.read(path, self._file_system, drop_errors=self._mode is Mode.RETRY)
        if not os.path.samestat(os.fstat(self.file.fileno()), path.stat()):  # rewritten without its errors
            self.file.close()
            self._open(path)
            self._lock(path)

    def begin(self) -> Sink:
        """Empty the file, or go to its end, and take lines."""
        if self._regular and self._mode is Mode.OVERWRITE:
            self._file_system.truncate(self.file, 0)
        if self._regular:
            self.file.seek(0, os.SEEK_END)
        packed = self._path is not None and is_packed(self._path)
        plain = sink_of(self.file, packed=packed, file_system=self._file_system)
        sink: Sink = plain
        if self._regular and self._path is not None:
            sink = _WatchedSink(plain, self.file, self._path)
        self._sink = sink
        return sink

    def close(self) -> None:
        """Write what is held, and give the file back. More than one call does no harm."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
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
        with contextlib.suppress(OSError, OutputError):  # the error on its way out is the one to report
            self.close()

    def _open(self, path: Path) -> None:
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), "wb")
        self._regular = stat.S_ISREG(os.fstat(self.file.fileno()).st_mode)

    def _lock(self, path: Path) -> None:
        if not _lock(self.file):
            raise OutputError(f"{path} is being written by another process; wait for it or use another file")

    def _give_back(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            if self._is_new and self._path.stat().st_size == 0:
                self._path.unlink()


class _WatchedSink:
    """A sink that looks now and then, and when it closes, whether its file is still there with all that it wrote.

    Raises OutputError where it is not.
    """

    def __init__(self, sink: CountedSink, file: BinaryIO, path: Path) -> None:
        self._sink, self._file, self._path = sink, file, path
        self._start = os.fstat(file.fileno()).st_size
        self._next = time.monotonic() + CHECK_EVERY_S

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        if time.monotonic() >= self._next:
            self._check()
            self._next = time.monotonic() + CHECK_EVERY_S

    def close(self) -> None:
        self._sink.close()
        self._check()

    def _check(self) -> None:
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            raise self._lost("was deleted") from None
        if not os.path.samestat(ours, there):
            raise self._lost("was replaced by another file")
        wanted = self._start + self._sink.written
        if ours.st_size != wanted:
            raise self._lost(f"was changed (it has {ours.st_size} bytes, not {wanted})")

    def _lost(self, how: str) -> OutputError:
        return OutputError(
            f"{self._path} {how} while this run wrote to it, so results are lost; let nothing else change it, and "
            "run again"
        )


def same_file(first: BinaryIO, second: BinaryIO) -> bool:
    """Whether two open files are one plain file of the system."""
    try:
        one, other = os.fstat(first.fileno()), os.fstat(second.fileno())
    except OSError:  # not a file of the system
        return False
    return stat.S_ISREG(one.st_mode) and os.path.samestat(one, other)


def _lock(file: BinaryIO) -> bool:
    """Take the file for this process until it closes it or dies; true where the system has no such lock."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return True
    return True
