"""Opening the files of `xla-engine run`."""

import contextlib
import gzip
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, cast

from xla_engine.batch.resume import is_packed


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open a file of requests for reading; `-` is standard input, and .gz files are decompressed."""
    if path == "-":
        yield sys.stdin.buffer
    elif is_packed(path):
        with gzip.open(path, "rb") as packed:
            yield cast("BinaryIO", packed)
    else:
        with open(path, "rb") as source:
            yield source


def silence_stdout() -> None:
    """Discard the buffer of standard output after a failed write, so that it does not fail again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
