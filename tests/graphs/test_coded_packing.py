"""Packing in C++: the bytes of `tests.support.packing`, for every kind of block, order and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.coded_blocks import random_rows
from tests.support.instruction_sets import NAMES, NATIVE_ISAS, registered
from tests.support.packing import coded_blocks
from xla_engine.graphs.ops.coded import KINDS, CodedForm, Order
from xla_engine.runner.native_library.build import packer

PARTS = {"pairs": "pack_coded", "fours": "pack_fours"}
RARE = 0.02  # of a group's scales


def packed(isa: str, kind: str, rows: np.ndarray, width: int, order: Order) -> tuple[np.ndarray, bool]:
    form = CodedForm(len(rows), width, ((kind, len(rows) // 16),), order)
    blocks = np.full((len(rows) // 16, form.block_bytes(kind)), 0xA5, np.uint8)
    finite = packer(isa, order)(kind, form, rows, blocks.reshape(-1))
    return blocks, finite


@pytest.mark.parametrize("order", PARTS)
@pytest.mark.parametrize("isa", NATIVE_ISAS)
@given(data=st.data())
def test_packed_bytes_are_those_of_the_reference(isa: str, order: Order, data: st.DataObject) -> None:
    """Of any bytes: most have scales that are not finite somewhere, which is the same in both."""
    registered(isa, PARTS[order])
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    blocks, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    width = groups * KINDS[kind].group
    seed = data.draw(st.integers(0, 2**32 - 1))
    rows = random_rows((16 * blocks, width), kind, seed)
    if data.draw(st.booleans()):  # any bytes, or some of them
        generator = np.random.default_rng(seed)
        changed = generator.random(rows.shape) < data.draw(st.sampled_from([RARE / width, RARE, 1.0]))
        rows[changed] = generator.integers(0, 256, changed.sum())
    want, want_finite = coded_blocks(kind, rows, width, order)
    found, finite = packed(isa, kind, rows, width, order)
    np.testing.assert_array_equal(found, want, err_msg=kind)
    assert finite is want_finite


@pytest.mark.skipif(not NAMES, reason="no C++ kernels on this platform")
def test_rows_of_another_width_are_not_read() -> None:
    isa = str(registered(NAMES[0], PARTS["fours"]))
    rows = random_rows((16, 512), "Q4_K", 0)
    with pytest.raises(AssertionError, match="Q4_K: rows of 288 bytes"):
        packed(isa, "Q4_K", rows, 768, "fours")
