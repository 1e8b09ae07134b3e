"""The training example: what it rewards, and that its steps see no difference where a control does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo() -> Any:
    pytest.importorskip("optax")
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(" x * 2", 1), (" x\nwhatever(", 1), (" y", 0), (" x *", 0), ("", 0), (' "x"', 0), (" \0x", 0)],
)
def test_what_is_rewarded(grpo: Any, answer: str, expected: float) -> None:
    assert grpo.reward("x", "def f(x):\n    return", answer) == expected


@pytest.mark.release
def test_steps_of_training_differ_nowhere_and_those_of_the_control_do(grpo: Any) -> None:
    assert [step["largest"] for step in grpo.train(3)] == [0, 0, 0]
    assert all(step["largest"] > 1e-3 for step in grpo.train(2, control=True))
