"""Freed memory goes back to the operating system, and large arrays move into huge pages."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from xla_engine.utils.resident import HugePages, _is_as_its_file

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

LIBRARY = """
import jax.numpy as jnp
from xla_engine.utils.resident import release_library_pages, resident_bytes

before = resident_bytes()
release_library_pages()
print(before - resident_bytes())
assert (jnp.arange(3) + 1).tolist() == [1, 2, 3]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_pages_of_a_large_library_are_released_and_come_back() -> None:
    found = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 30_000_000  # of some 100


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_mapping_of_which_pages_were_written_is_not_as_its_file(tmp_path: Path) -> None:
    nbytes = 64 * mmap.PAGESIZE
    path = tmp_path / "library.so"
    path.write_bytes(bytes(nbytes))
    with open(path, "rb") as file, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        mapped = mmap.mmap(
            file.fileno(), nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert sum(mapped[:: mmap.PAGESIZE]) == 0 and _is_as_its_file(pages, address, nbytes)
        mapped[3 * mmap.PAGESIZE] = 1
        assert not _is_as_its_file(pages, address, nbytes)


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
