"""Kernels for TPUs, run by Pallas' interpreter of TPU kernels: the sums of NumPy, and of a row alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from xla_engine.graphs.ops import tpu_rows
from xla_engine.graphs.ops.tpu_rows import tpu_rms_norm, tpu_sum_last

RACES = pltpu.InterpretParams(detect_races=True)
SHAPES = st.tuples(st.integers(1, 40), st.sampled_from((1, 48, 128, 256, 300, 576)))


def rows_of(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.full
@given(shape=SHAPES, few=st.integers(1, 8))
@settings(max_examples=6, deadline=None)
def test_a_row_has_the_sum_that_it_has_alone(shape: tuple[int, int], few: int) -> None:
    values = rows_of(shape)
    found = np.asarray(tpu_sum_last(jnp.asarray(values), interpret=True))
    assert found.shape == (len(values), 1)
    np.testing.assert_allclose(found[:, 0], values.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-4)
    some = np.asarray(tpu_sum_last(jnp.asarray(values[-few:]), interpret=True))
    np.testing.assert_array_equal(some, found[-few:])


@pytest.mark.full
@given(shape=SHAPES, dtype=st.sampled_from(("bfloat16", "float32")))
@settings(max_examples=6, deadline=None)
def test_a_row_has_the_norm_that_it_has_alone(shape: tuple[int, int], dtype: str) -> None:
    x, weight = rows_of(shape), rows_of((shape[1], 1))[:, 0]
    given = jnp.asarray(weight), 1e-5, jnp.dtype(dtype)
    found = tpu_rms_norm(jnp.asarray(x), *given, interpret=True)
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    rounding = 1e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(found, np.float64), x * scale * weight, rtol=rounding, atol=rounding
    )
    assert found.dtype == dtype
    alone = tpu_rms_norm(jnp.asarray(x[-1:]), *given, interpret=True)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(found[-1:], np.float32))


@pytest.mark.full
def test_rows_of_several_spans_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_rows, "_SPAN", 128)
    monkeypatch.setattr(tpu_rows, "_BLOCK", 1)
    values = rows_of((37, 300))
    found = np.asarray(tpu_sum_last(jnp.asarray(values), interpret=RACES))
    np.testing.assert_allclose(found[:, 0], values.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-4)
    spans = np.split(np.pad(values, ((0, 0), (0, 84))), 3, axis=1)  # zeros behind the row
    first, second, third = (tpu_sum_last(jnp.asarray(part), interpret=True) for part in spans)
    np.testing.assert_array_equal(found, np.asarray(first + second + third))
    x, weight = jnp.asarray(values), jnp.ones(300)
    normed = tpu_rms_norm(x, weight, 1e-5, jnp.dtype(jnp.float32), interpret=RACES)
    assert float(jnp.abs(jnp.mean(normed * normed, axis=1) - 1).max()) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_races(dtype: str) -> None:
    x = jnp.asarray(rows_of((24, 256)))
    tpu_sum_last(x, interpret=RACES)
    tpu_rms_norm(x, x[0], 1e-5, jnp.dtype(dtype), interpret=RACES)
    assert not races_found()


def races_found() -> bool:
    """Whether the interpreter found races in a kernel that it ran."""
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    return bool(interpreter.races.races_found)
