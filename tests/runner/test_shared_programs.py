"""Engines of the tests share programs only while nothing that programs are made from is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.shared_programs import shared_programs
from xla_engine.graphs.ops.norms import rms_norm


@pytest.mark.parametrize(
    ("target", "other"),
    [
        ("xla_engine.graphs.steps.decode.sample_rows", lambda *_: None),
        ("xla_engine.graphs.steps.decode.sample_rows", rms_norm),  # of the package, too
        ("xla_engine.graphs.attention.xla.XlaAttention.attend_prefill", lambda *_: None),
        ("xla_engine.graphs.attention.backend.KEY_SPAN", 77),
        ("xla_engine.runner.runner.make_programs", lambda *_: None),
    ],
)
def test_nothing_is_shared_while_code_is_replaced(
    monkeypatch: pytest.MonkeyPatch, target: str, other: Any
) -> None:
    assert shared_programs("") is not None
    with monkeypatch.context() as patch:
        patch.setattr(target, other)
        assert shared_programs("") is None
    assert shared_programs("") is not None
