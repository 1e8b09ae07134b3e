"""A lock on an open file, which ends with the process."""

import time
from typing import IO, Any

PATIENCE_S = 1.0
"""How long a locked file is tried again. A child of this process shares its locks until it runs its own program."""


def lock(file: IO[Any]) -> bool:
    """Lock a file until it is closed; False if another process has locked it.

    Raises ImportError or OSError where the system or the file system has no such locks.
    """
    import fcntl

    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
