"""The published test vectors: two files that any CPU with portable bits accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.instruction_sets import HAS_KERNELS
from xla_engine.receipts import audit, verify

VECTORS = Path(__file__).parents[1] / "golden" / "receipts"
_FILES = VECTORS / "out.jsonl", VECTORS / "out.receipts.jsonl"
_ROOT = "f91429f3276a20851199097da3c106a919f33431a6ff3351166ea895e470f990"
_PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


def test_the_vectors_are_verified() -> None:
    report = verify(*_FILES, public_key=_PUBLIC)
    assert report.ok and (report.answers, report.errors) == (6, 1), report.lines()
    assert report.root == _ROOT and report.public_key == _PUBLIC


@pytest.mark.full
@pytest.mark.skipif(not HAS_KERNELS, reason="portable bits need the C++ kernels")
def test_the_vectors_are_accepted_on_this_machine() -> None:
    report = audit(*_FILES, public_key=_PUBLIC, max_num_seqs=3, prefill_lanes=(4,))
    assert report.ok and report.checked == 6 and report.method == "prefill", report.lines()
