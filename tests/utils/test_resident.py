"""Freed memory goes back to the operating system, and large arrays move into huge pages."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from xla_engine.utils.resident import HugePages

SCRIPT = """
import numpy as np
from xla_engine.utils.resident import release_free_memory, resident_bytes

blocks = [np.ones(100_000, np.uint8) for _ in range(1000)]
blocks = [block for place, block in enumerate(blocks) if place % 10 == 0]
before = resident_bytes()
release_free_memory()
print(before - resident_bytes())
assert all(block.all() for block in blocks)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a function of glibc"
)
def test_freed_blocks_between_others_are_released() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 60_000_000  # of 90


def test_arrays_in_huge_pages_are_the_same_and_apart() -> None:
    pages = HugePages()
    sizes = (0, 1, 17, 1000, 900_000, 3_000_000) * 3
    given = [np.arange(size, dtype=np.float32) for size in sizes]  # large ones may stay where they are
    given.append(np.arange(6_000_000, dtype=np.int16).reshape(2, -1).T)
    held = [pages.hold(array) for array in given]
    for array, copy in zip(given, held, strict=True):
        assert (array == copy).all() and array.dtype == copy.dtype
        assert array.size == 0 or copy.ctypes.data % 64 == 0
    places = sorted((copy.ctypes.data, copy.nbytes) for copy in held if copy is not None)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))


def test_large_arrays_that_jax_can_adopt_stay_where_they_are() -> None:
    raw = np.zeros((8 << 20) + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][: 8 << 20]
    pages = HugePages()
    assert pages.hold(array) is array
    assert pages.hold(raw[-raw.ctypes.data % 64 + 1 :]).ctypes.data % 64 == 0
