"""Safely create temporary files with predictable names, and replace files by them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file for writing, replacing whatever a dead run or another user left under its name.

    A link is removed, never followed. Raises OSError, also if the name is taken again meanwhile.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give an OSError of the block the file's name; those of writing have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends without an error, and is removed otherwise.

    It is on the disk before it has the name, so that a machine that dies leaves the old file or the new one.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with open_new(new) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
