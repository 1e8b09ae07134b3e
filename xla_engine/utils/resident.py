"""The memory of a process."""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

HUGE = 2 << 20  # bytes of a huge page on x86-64, and on ARM with pages of 4 kB
_COLLAPSE = 25  # MADV_COLLAPSE, from Linux 6.1


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


def use_huge_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Move memory into huge pages, from which it is read faster, if the system can (Linux 6.1). Contents and addresses
    stay. spans: addresses and sizes in bytes."""
    if sys.platform == "linux":
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for address, size in huge_ranges(spans):
            advise(address, size, _COLLAPSE)  # an error leaves pages as they are


def huge_ranges(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole huge pages in spans of memory, as addresses and sizes. Less than a page between two spans counts as
    theirs: it belongs to the same heap."""
    joined: list[list[int]] = []  # begin, end
    for begin, size in sorted(spans):
        if joined and begin - joined[-1][1] < HUGE:
            joined[-1][1] = max(joined[-1][1], begin + size)
        else:
            joined.append([begin, begin + size])
    pages = [(-(-begin // HUGE) * HUGE, end // HUGE * HUGE) for begin, end in joined]
    return [(first, last - first) for first, last in pages if first < last]
