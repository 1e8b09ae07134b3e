"""Engines of the tests share programs only while nothing that programs are made from is replaced."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.shared_programs import SharedPrograms, shared_programs
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.ops.norms import rms_norm


@pytest.mark.parametrize(
    ("target", "other"),
    [
        ("xla_engine.graphs.steps.decode.sample", lambda *_: None),
        ("xla_engine.graphs.steps.decode.sample", rms_norm),  # of the package, too
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


def test_another_process_neither_traces_nor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: with nothing in memory. A program whose entry JAX's cache has lost is compiled as usual."""
    shape = jax.ShapeDtypeStruct((3, 7), jnp.float32)
    weight = jax.ShapeDtypeStruct((7,), jnp.float32)
    epsilon = time.time() * 1e-12  # a program that no earlier run has made
    norm = Program(name="norm", function=partial(rms_norm, eps=epsilon), arguments=(shape, weight))

    def run() -> tuple[bool, bytes]:
        inventory = Inventory(store=SharedPrograms("test"))
        inventory.compile([norm])
        (report,) = inventory
        values = jnp.linspace(-3, 5, 21, dtype=jnp.float32).reshape(shape.shape)
        return report.lower_seconds == 0, np.asarray(inventory("norm", values, jnp.ones(7))).tobytes()

    def run_elsewhere() -> tuple[bool, bytes]:
        with monkeypatch.context() as patch:
            patch.setattr("tests.support.shared_programs._programs", OrderedDict())
            return run()

    assert run_elsewhere() == (False, expected := run()[1])
    assert run_elsewhere() == (True, expected)
    with monkeypatch.context() as patch:
        patch.setattr("jax._src.compilation_cache._get_cache", lambda _: None)
        assert run_elsewhere() == (False, expected)
