"""Products on CUDA: the kernel, interpreted or on a GPU, against float64, and its lowering where there is no GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graphs.test_attention_lowering import hopper
from xla_engine.graphs.linear.gpu import GpuProducts, _parts
from xla_engine.graphs.linear.products import Norm

PRODUCTS = GpuProducts(interpret=jax.default_backend() != "gpu")
FEATURES, WIDTH = 200, 192


def operands(rows: int, width: int = WIDTH, features: int = FEATURES) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(rows)
    weight = draw.standard_normal((features, width), np.float32)
    return jnp.asarray(weight, jnp.bfloat16), jnp.asarray(draw.standard_normal((rows, width), np.float32))


def exact(weight: jax.Array, x: jax.Array) -> np.ndarray:
    product = np.asarray(x.astype(jnp.bfloat16), np.float64) @ np.asarray(weight, np.float64).T
    return np.asarray(product)


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 65])
def test_products_are_those_of_float64(rows: int) -> None:
    """In three parts, and with a last tile that is not full; 65 rows go to XLA."""
    weight, x = operands(rows)
    bias, residual = jnp.arange(FEATURES, dtype=jnp.float32), jnp.ones((rows, FEATURES))
    found = PRODUCTS.linear(weight, x, bias=bias, residual=residual)
    np.testing.assert_allclose(found, exact(weight, x) + np.asarray(bias) + 1, atol=1e-3)
    logits = PRODUCTS.head(weight, Norm(jnp.ones(WIDTH), 0.0), x)
    unit = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True))
    np.testing.assert_allclose(logits.T, exact(weight, unit), atol=0.3)


def test_widths_of_no_whole_steps_are_products_too() -> None:
    weight, x = operands(5, width=72)
    np.testing.assert_allclose(PRODUCTS.linear(weight, x), exact(weight, x), atol=1e-3)


def test_the_parts_of_a_sum_depend_on_the_weight_alone() -> None:
    """Llama-3.1-8B's products fill the device with the fewest parts, none of them long; small ones are cut in more."""
    shapes = {(6144, 4096): 1, (4096, 4096): 2, (28672, 4096): 1, (4096, 14336): 4, (128256, 4096): 1}
    assert {shape: _parts(*shape) for shape in shapes} == shapes
    assert _parts(576, 1536) == 8 and _parts(960, 576) == 3 and _parts(64, 72) == 1


@pytest.mark.parametrize("rows", [8, 64])
def test_the_kernel_lowers_for_cuda(rows: int) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((FEATURES, WIDTH), (rows, WIDTH))]
    with hopper():
        traced: Any = jax.jit(functools.partial(GpuProducts().linear)).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
