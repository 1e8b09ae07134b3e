"""Freed memory goes back to the operating system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

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
