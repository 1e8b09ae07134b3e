"""Freed memory goes back to the operating system, and large arrays move into huge pages."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from xla_engine.utils.resident import HUGE, huge_ranges, use_huge_pages

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


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(HUGE, HUGE - 1)], []),
        ([(1, 3 * HUGE)], [(HUGE, 2 * HUGE)]),
        ([(HUGE, 2 * HUGE), (5 * HUGE, HUGE)], [(HUGE, 2 * HUGE), (5 * HUGE, HUGE)]),
        ([(3 * HUGE + 64, HUGE), (2 * HUGE, HUGE + 32)], [(2 * HUGE, 2 * HUGE)]),
        ([(HUGE, 3 * HUGE), (2 * HUGE, 64)], [(HUGE, 3 * HUGE)]),
    ],
)
def test_huge_ranges_are_whole_pages(spans: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert huge_ranges(spans) == expected


def test_memory_in_huge_pages_keeps_its_contents() -> None:
    array = np.arange(4 << 20, dtype=np.uint32)
    use_huge_pages(
        [(array.ctypes.data, array.nbytes), (8, 16 * HUGE)]
    )  # the latter is nobody's: nothing happens
    assert (array == np.arange(4 << 20, dtype=np.uint32)).all()
