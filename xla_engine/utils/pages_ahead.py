"""Memory for weights whose pages are made before the weights are read, in a thread, while the program still imports.

A system makes the pages of memory when they are first written. On a virtual machine whose host makes its pages then,
too, this takes longer than reading and packing the weights (`findings/start.md`).
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from typing import Any

import numpy as np

from xla_engine.utils import host_memory

_STEP = 4 << 20  # bytes touched at a time
_MOST = 0.5  # of the available memory
_started: list[PagesAhead] = []  # none, or one that nobody has taken


class PagesAhead:
    """A region of memory, from which arrays are cut until it is used up. Their pages go back with each of them."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if the system gives no such region."""
        self._region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):
            self._region.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._region, np.uint8)
        self._address, self._size = self._bytes.ctypes.data, nbytes
        self.touched = self._taken = 0
        self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._touch, name="pages", daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        while not self._ended and self.touched < self._size:
            last = min(self.touched + _STEP, self._size)
            self._bytes[self.touched : last : mmap.PAGESIZE] = 0  # without the interpreter lock
            self.touched = last

    def stop(self) -> None:
        """Touch no more pages, since whoever uses the memory does so."""
        self._ended = True
        self._thread.join()

    def room(self, nbytes: int) -> np.ndarray | None:
        """Bytes `[nbytes]` on a page of their own, once `stop` was called; None if less is left."""
        assert self._ended
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._taken + size > self._size:
                return None
            first = self._taken
            self._taken += size
        return np.asarray(_Range(self._region, self._address, first, nbytes))

    def give_back(self) -> None:
        """Give back the pages that no array has."""
        with self._lock:
            _release(self._region, self._taken, self._size - self._taken)
            self._taken = self._size


class _Range:
    """Part of a region, whose pages go back with the last array that shows it."""

    def __init__(self, region: mmap.mmap, address: int, first: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + first, False),
        }
        self._region, self._first, self._nbytes = region, first, nbytes

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _release(self._region, self._first, self._nbytes)


def _release(region: mmap.mmap, first: int, nbytes: int) -> None:
    if nbytes > 0:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            region.madvise(mmap.MADV_DONTNEED, first, nbytes)


def touch_ahead(nbytes: int) -> None:
    """Begin to make pages for weights of this size in a thread, at most half of the available memory."""
    available = host_memory.available()
    if _started or available is None or (nbytes := min(nbytes, int(available * _MOST))) < _STEP:
        return
    with contextlib.suppress(OSError):
        _started.append(PagesAhead(nbytes))


def touched_ahead() -> int:
    """Bytes that were touched for weights that are not loaded."""
    return _started[0].touched if _started else 0


def take_ahead() -> PagesAhead | None:
    """The pages that were begun, if any; only the first caller gets them."""
    if not _started:
        return None
    pages = _started.pop()
    pages.stop()
    return pages
