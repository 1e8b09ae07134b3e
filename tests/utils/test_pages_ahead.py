"""Pages made ahead: arrays do not overlap, keep what is written, and give their pages back one by one."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_engine.utils import host_memory, pages_ahead
from xla_engine.utils.pages_ahead import PagesAhead, take_ahead, touch_ahead, touched_ahead
from xla_engine.utils.resident import HugePages, resident_bytes

_MB = 1 << 20


def region(nbytes: int) -> PagesAhead:
    pages = PagesAhead(nbytes)
    pages.stop()
    return pages


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3 * _MB), max_size=12))
def test_arrays_are_apart_and_keep_what_is_written(sizes: list[int]) -> None:
    pages = region(8 * _MB)
    found = [pages.room(size) for size in sizes]
    kept = [array for array in found if array is not None]
    for number, array in enumerate(kept):
        array[...] = number
    places = sorted((array.ctypes.data, array.nbytes) for array in kept)
    assert all(first + size <= second and not second % 64 for (first, size), (second, _) in pairwise(places))
    assert [array.nbytes for array in found if array is not None] == [
        size for size, array in zip(sizes, found, strict=True) if array is not None
    ]
    del found
    pages.give_back()
    while kept:  # the pages of others stay
        kept.pop(len(kept) // 2)
        assert all((array == array[0]).all() for array in kept)
    assert pages.room(1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pages_go_back_with_the_last_array_that_shows_them() -> None:
    pages = region(64 * _MB)
    one, other = pages.room(24 * _MB), pages.room(24 * _MB)
    assert one is not None and other is not None
    one[...], other[...] = 1, 2
    view, before = one[5:9].view(np.uint16), resident_bytes() or 0
    del one
    assert (resident_bytes() or 0) > before - 4 * _MB
    del view
    assert (resident_bytes() or 0) < before - 20 * _MB and (other == 2).all()
    after = resident_bytes() or 0
    pages.give_back()
    assert (resident_bytes() or 0) <= after


def test_the_first_weights_take_the_pages_and_they_count_as_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_ahead, "_started", [])
    monkeypatch.setattr(host_memory, "available", lambda: 40 * _MB)
    touch_ahead(100 * _MB)
    touch_ahead(100 * _MB)  # for another engine: nothing more
    [pages] = pages_ahead._started
    assert len(pages._bytes) == 20 * _MB  # half
    pages._thread.join()
    assert touched_ahead() == 20 * _MB
    weights, others = HugePages(), HugePages()
    assert touched_ahead() == 0 and take_ahead() is None
    first = pages._bytes.ctypes.data

    def is_inside(array: np.ndarray) -> bool:
        return first <= array.ctypes.data < first + 20 * _MB

    assert is_inside(weights.room(1000)) and is_inside(weights.room(6 * _MB))
    assert not is_inside(others.room(1000)) and not is_inside(weights.room(30 * _MB))
    weights.give_back()
    assert not is_inside(weights.room(1000))


def test_little_memory_is_not_touched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "_started", [])
    for available, size in ((None, 100 * _MB), (_MB, 100 * _MB), (100 * _MB, 100)):
        monkeypatch.setattr(host_memory, "available", lambda found=available: found)
        touch_ahead(size)
    assert not pages_ahead._started
