"""Products on CUDA: the kernel, interpreted or on a GPU, against float64, and its lowering where there is no GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graphs.test_attention_lowering import hopper
from tests.support.tiers import default
from xla_engine.graphs.linear.gpu import GpuProducts
from xla_engine.graphs.linear.products import Norm
from xla_engine.graphs.ops import gpu_call
from xla_engine.graphs.ops.gpu_rows import gpu_rms_norm, gpu_sum_last, gpu_sum_middle

PRODUCTS = GpuProducts(interpret=jax.default_backend() != "gpu")
FEATURES, WIDTH = 200, 192


def operands(rows: int, width: int = WIDTH, features: int = FEATURES) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(rows)
    weight = draw.standard_normal((features, width), np.float32)
    return jnp.asarray(weight, jnp.bfloat16), jnp.asarray(draw.standard_normal((rows, width), np.float32))


def exact(weight: jax.Array, x: jax.Array) -> np.ndarray:
    product = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    return np.asarray(product)


@pytest.mark.parametrize("rows", default([33, 1, 8, 65]))
def test_products_are_those_of_float64(rows: int) -> None:
    """In tiles that are not full, of few rows and of many."""
    weight, x = operands(rows)
    bias, residual = jnp.arange(FEATURES, dtype=jnp.float32), jnp.ones((rows, FEATURES))
    found = PRODUCTS.linear(weight, x, bias=bias, residual=residual)
    np.testing.assert_allclose(found, exact(weight, x) + np.asarray(bias) + 1, atol=1e-3)
    logits = PRODUCTS.head(weight, Norm(jnp.ones(WIDTH), 0.0), x)
    unit = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True))
    np.testing.assert_allclose(logits.T, exact(weight, unit), atol=0.3)


@pytest.mark.parametrize("rows", [3, 70])
def test_gated_products_are_those_of_float64(rows: int) -> None:
    weight, x = operands(rows)
    bias = jnp.linspace(-1, 1, FEATURES, dtype=jnp.float32)
    gates, ups = np.split(exact(weight, x) + np.asarray(bias, np.float64), 2, axis=1)
    found = PRODUCTS.gated(weight, x, bias=bias).astype(jnp.float32)
    np.testing.assert_allclose(found, gates / (1 + np.exp(-gates)) * ups, rtol=1e-2, atol=1e-2)


@pytest.mark.full
def test_a_row_has_its_own_sums_whatever_lies_beside_it() -> None:
    """Norms and sums of more values than a program adds, and of sizes that are no powers of two."""
    draw = np.random.default_rng(0)
    interpret = PRODUCTS.interpret
    for width in (130, 576):
        x = draw.standard_normal((9, width)).astype(np.float32)
        weight = jnp.ones(width)
        found = gpu_rms_norm(x, weight, 1e-6, jnp.dtype(jnp.float32), interpret=interpret)
        square = np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True)
        np.testing.assert_allclose(found, x / np.sqrt(square + 1e-6), rtol=1e-5)
        assert np.array_equal(found[:1], gpu_rms_norm(x[:1], weight, 1e-6, found.dtype, interpret=interpret))
        total = gpu_sum_last(jnp.asarray(x), interpret=interpret)
        np.testing.assert_allclose(total[:, 0], x.sum(axis=1, dtype=np.float64), atol=1e-4)
    values = jnp.asarray(draw.standard_normal((2, 150, 130)), jnp.float32)
    found = gpu_sum_middle(values, interpret=interpret)
    np.testing.assert_allclose(found, np.asarray(values, np.float64).sum(axis=1), atol=1e-4)
    assert np.array_equal(found[1:, :5], gpu_sum_middle(values[1:, :, :5], interpret=interpret))


def test_widths_of_no_whole_steps_are_products_too() -> None:
    weight, x = operands(5, width=72)
    np.testing.assert_allclose(PRODUCTS.linear(weight, x), exact(weight, x), atol=1e-3)


@pytest.mark.parametrize("rows", [8, 64])
def test_the_kernel_lowers_for_cuda_once_for_all_weights_of_a_shape(rows: int) -> None:
    weight, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((FEATURES, WIDTH), (rows, WIDTH)))

    def twice(first: jax.Array, second: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [GpuProducts().linear(each, x) for each in (first, second)]

    with hopper():
        traced: Any = jax.jit(twice).trace(weight, weight, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("early", [True, False])
def test_on_a_device_that_can_a_kernel_lets_the_next_one_start(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_call, "starts_early", lambda: early)
    gpu_call.kernel_call.cache_clear()
    x = jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)
    with hopper():
        traced: Any = jax.jit(lambda x: gpu_sum_last(x)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    gpu_call.kernel_call.cache_clear()
    assert text.count("griddepcontrol.launch_dependents") == early
