"""The memory of a process."""

import contextlib
import ctypes
import mmap
import os
import re
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

from xla_engine.utils.pages_ahead import take_ahead

_ALIGNMENT = 64  # bytes; jax adopts a host array with this alignment, and copies any other
_LARGE = 4 << 20  # bytes; numpy asks Linux for huge pages from this size on
_BLOCK = 32 << 20  # bytes; glibc maps as much apart, so that it goes back to the system with its last array

_LIBRARY = 16 << 20  # bytes of code or constants from which a library counts as large
# A mapping of a file that cannot be written, in /proc/self/maps: where it begins and ends.
_MAPPED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \S+ +/", re.M)
_FROM_FILE, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, 1 << 63  # of a page, in /proc/self/pagemap


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


def release_library_pages() -> None:
    """Release the pages of large libraries' code and constants, on Linux, which takes some 3 ms.

    They remain in the system's page cache, and those that are used come back. Importing jax touches 110 MB all over
    XLA's library, of which a start that loads its programs, and its steps, use some 20.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for first, last in _MAPPED.findall(Path("/proc/self/maps").read_text()):
                address, nbytes = int(first, 16), int(last, 16) - int(first, 16)
                if nbytes >= _LIBRARY and _is_as_its_file(pages, address, nbytes):
                    advise(address, nbytes, mmap.MADV_DONTNEED)


def _is_as_its_file(pages: BinaryIO, address: int, nbytes: int) -> bool:
    """Whether no page was written, by the loader or a debugger, since that would be lost.

    pages: of this process, as /proc/self/pagemap has them, 64 bits each.
    """
    pages.seek(address // mmap.PAGESIZE * 8)
    found = np.frombuffer(pages.read(nbytes // mmap.PAGESIZE * 8), np.uint64)
    own = (found & np.uint64(_PRESENT | _SWAPPED) != 0) & (found & np.uint64(_FROM_FILE) == 0)
    return len(found) * mmap.PAGESIZE == nbytes and not own.any()


class HugePages:
    """Room for arrays in huge pages, from which a CPU reads faster, if the system has them. Threads may share it.

    Linux makes huge pages when memory is first written, which takes less time than many small ones; moving memory
    there later takes a second copy of all. Small arrays are cut from blocks, since numpy asks for huge pages in large
    ones only. A block is freed with the last of its arrays. The first arrays get the pages that were made ahead
    (`pages_ahead`), if there are any, until they are given back.
    """

    def __init__(self) -> None:
        self._ahead = take_ahead()
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)  # the rest of the newest block

    def room(self, nbytes: int) -> np.ndarray:
        """Bytes `[nbytes]` that jax can adopt."""
        if self._ahead is not None and (ahead := self._ahead.room(nbytes)) is not None:
            return ahead
        if nbytes >= _LARGE:
            large = np.empty(nbytes + _ALIGNMENT, np.uint8)
            return large[-large.ctypes.data % _ALIGNMENT :][:nbytes]
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if size > len(self._free):
                block = np.empty(_BLOCK, np.uint8)
                self._free = block[-block.ctypes.data % _ALIGNMENT :]
            room, self._free = self._free[:nbytes], self._free[size:]
        return room

    def hold(self, array: np.ndarray) -> np.ndarray:
        """A copy that jax can adopt; the array itself if it is large and jax can adopt it."""
        if array.nbytes >= _LARGE and array.ctypes.data % _ALIGNMENT == 0:
            return array
        copy: np.ndarray = self.room(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def give_back(self) -> None:
        """Give back the pages that were made ahead and are not used."""
        if self._ahead is not None:
            self._ahead.give_back()
            self._ahead = None
