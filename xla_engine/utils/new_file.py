"""Safely create temporary files with predictable names."""

import os
from pathlib import Path
from typing import BinaryIO


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file for writing, replacing whatever a dead run or another user left under its name.

    A link is removed, never followed. Raises OSError, also if the name is taken again meanwhile.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")
