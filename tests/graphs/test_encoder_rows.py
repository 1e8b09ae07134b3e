"""The C++ kernels between an encoder's products: the formulas, and a row alone decides its bits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_engine.graphs.ops.encoder_rows import activated, added_norm
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.instruction_sets import available

HERE = tuple(each.name for each in available())
DRAW = np.random.default_rng(11)
ROWS, WIDTH, EPS = 37, 96, 1e-6
X, RESIDUAL = (DRAW.standard_normal((ROWS, WIDTH)).astype(np.float32) * 3 for _ in range(2))
BIAS, WEIGHT, SHIFT = (DRAW.standard_normal(WIDTH).astype(np.float32) for _ in range(3))
LIVE = DRAW.random(ROWS) < 0.8

pytestmark = pytest.mark.full


def run(function: Any, *arguments: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.jit(function)(*arguments).astype(jnp.float32))


@pytest.mark.parametrize("isa", HERE)
def test_rows_are_the_formulas_and_depend_on_themselves_alone(isa: str) -> None:
    register(isa, ("encoder",))

    def norm(x: Any, residual: Any, live: Any) -> Any:
        return added_norm(x, BIAS, residual, WEIGHT, SHIFT, EPS, (isa, live))

    wide = RESIDUAL.astype(np.float64) + X + BIAS
    wide -= wide.mean(1, keepdims=True)
    expected = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS) * WEIGHT + SHIFT
    found = run(norm, X, RESIDUAL, LIVE)
    np.testing.assert_allclose(found[LIVE], expected[LIVE], rtol=0, atol=1e-5)
    assert not found[~LIVE].any()
    some = DRAW.permutation(np.flatnonzero(LIVE))[:5]
    assert np.array_equal(run(norm, X[some], RESIDUAL[some], np.ones(5, bool)), found[some])
    formulas = {
        "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": lambda x: max(x, 0.0),
        "silu": lambda x: x / (1 + math.exp(-x)),
    }
    for kind, formula in formulas.items():
        for dtype, close in ((jnp.float32, 1e-6), (jnp.bfloat16, 0.004)):

            def act(x: Any, live: Any, kind: str = kind, dtype: Any = dtype) -> Any:
                return activated(x, BIAS, kind, dtype, (isa, live))

            found = run(act, X, LIVE)
            expected = np.vectorize(formula)(X.astype(np.float64) + BIAS)
            np.testing.assert_allclose(found[LIVE], expected[LIVE], rtol=close, atol=2e-6)
            assert not found[~LIVE].any()
            assert np.array_equal(run(act, X[some], np.ones(5, bool)), found[some])

            def gate(x: Any, live: Any, kind: str = kind, dtype: Any = dtype) -> Any:
                return activated(x, BIAS, kind, dtype, (isa, live), gated=True)

            half = X.shape[1] // 2
            found = run(gate, X, LIVE)
            expected = expected[:, :half] * (X + BIAS)[:, half:]
            np.testing.assert_allclose(found[LIVE], expected[LIVE], rtol=2 * close, atol=5e-6)


def test_instruction_sets_agree_to_the_bit() -> None:
    found = []
    for isa in HERE:
        register(isa, ("encoder",))

        def both(x: Any, isa: str = isa) -> Any:
            native = (isa, jnp.asarray(LIVE))
            hidden = activated(x, BIAS, "gelu", jnp.float32, native)
            return added_norm(hidden, BIAS, RESIDUAL, WEIGHT, SHIFT, EPS, native)

        found.append(run(both, X))
    assert all(np.array_equal(each, found[0]) for each in found)
