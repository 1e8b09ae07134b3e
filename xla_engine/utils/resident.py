"""The memory of a process."""

import ctypes
import os
import sys
from pathlib import Path


def resident_bytes(process: int | str = "self") -> int | None:
    """Resident memory of a process in bytes; None if the system does not tell. process: its id."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGESIZE")


def release_free_memory() -> None:
    """Release the pages of freed blocks that glibc keeps, which takes some 10 ms; other C libraries are left alone.

    Reading weights and loading programs frees many blocks that lie between others.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
