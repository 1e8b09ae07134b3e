"""Opening the files of `xla-engine run` without harm to what is in them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import BinaryIO

from xla_engine.cli._common import NotStarted


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as source:
            yield source


@contextlib.contextmanager
def open_output(path: str, source: BinaryIO) -> Iterator[BinaryIO]:
    """Open for writing without touching what is there yet. A new file that stays empty is removed again."""
    if path == "-":
        yield sys.stdout.buffer
        return
    is_new = not os.path.lexists(path)
    sink = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
    try:
        if _same_file(source, sink):
            raise NotStarted(f"{path}: output and input are the same file")
        yield sink
        sink.close()
    finally:
        with contextlib.suppress(OSError):  # the write that failed before was the error to report
            sink.close()
        if is_new and os.path.getsize(path) == 0:
            os.unlink(path)


def _same_file(source: BinaryIO, sink: BinaryIO) -> bool:
    try:
        first, second = os.fstat(source.fileno()), os.fstat(sink.fileno())
    except OSError:  # not a file of the system
        return False
    return stat.S_ISREG(first.st_mode) and os.path.samestat(first, second)


def truncate(sink: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(sink.fileno()).st_mode):
            sink.truncate(0)
