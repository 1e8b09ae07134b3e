"""Helper files whose names can be guessed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file for writing, in place of what a run that died, or another user, left under its name.

    A link that was put there is removed, never followed. Raises OSError, also where the name is taken again meanwhile.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")
