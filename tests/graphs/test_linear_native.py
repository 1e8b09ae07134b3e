"""C++ products in bf16 and int8, for every instruction set: they agree with XLA's, and rows are independent."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import HERE
from tests.support.models import TINY
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import WEIGHT_LEFT, Activation, Norm, Products, Role
from xla_engine.graphs.ops.int8 import Quantized, quantize_weight
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.runner.backends import choose_products
from xla_engine.runner.native_library.instruction_sets import available

VOCABULARY = 199  # the head ends within a tile
PLAIN = 2  # of the products of `layer`, the one without norm, bias and residual; those behind it add to it
BF16, INT8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8)
PARTS = ("linear_bf16", "linear_int8")
WIDTHS = {BF16: (352, 672), INT8: (704, 1344)}  # whole tiles, odd numbers of them; more than one part of K
MODEL = replace(TINY, hidden_size=192, intermediate_size=320, num_attention_heads=12, num_key_value_heads=4)


@pytest.fixture(scope="module", params=[BF16, INT8], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=HERE)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def products(dtype: Any, isa: str) -> NativeProducts:
    try:
        found = choose_products("native", MODEL, dtype, isa, parts=PARTS)
    except ConfigError as error:
        pytest.skip(str(error))
    assert isinstance(found, NativeProducts)
    return found


@functools.cache
def weights(form: Products, dtype: Any) -> list[Any]:
    """Draw and pack the weights of `layer`, in the order of their use."""
    rng = np.random.default_rng(0)
    width, inner = WIDTHS[dtype]

    def drawn(*shape: int, role: Role = "linear") -> Any:
        values = rng.standard_normal(shape, np.float32) * 0.2
        if dtype == BF16:
            return jnp.asarray(form.pack(np.asarray(values, jnp.bfloat16), role))
        kept, scale = quantize_weight(values)
        return Quantized(jnp.asarray(form.pack(kept, role)), jnp.asarray(form.pack(scale, "scale")))

    mlp = ((2 * inner, width), (width, inner))
    shapes = ((inner, width), (width, width), (width, width), *mlp, *mlp, *mlp)
    return [*itertools.starmap(drawn, shapes), drawn(VOCABULARY, width, role="head")]


@functools.partial(jax.jit, static_argnums=(0, 1))
def layer(form: Products, dtype: Any, weights: list[Any], x: Any, live: Any = None) -> list[np.ndarray]:
    """Compute each product once, in the order of a layer; results are row-major."""
    form = form if live is None else form.for_rows(live)
    rng, (width, inner), weight = np.random.default_rng(0), WIDTHS[dtype], iter(weights)
    norm = Norm(jnp.asarray(rng.standard_normal(width, np.float32)), 1e-5)
    bias = jnp.asarray(rng.standard_normal(inner, np.float32))
    qkv = form.linear(next(weight), x, norm=norm, bias=bias)
    attended = jnp.tanh(qkv[:, :width])
    added = form.linear(next(weight), attended.astype(jnp.bfloat16), residual=x)
    plain = form.linear(next(weight), attended)
    outs = [qkv, added, plain]
    forms: tuple[tuple[Activation, jax.Array | None], ...] = (
        ("silu", None),
        ("gelu_tanh", None),
        ("silu", jnp.tile(bias, 2)),
    )
    shifted = norm._replace(bias=jnp.asarray(rng.standard_normal(width, np.float32)))
    for activation, gate_bias in forms:
        norm = norm if gate_bias is None else shifted
        hidden = form.gated(next(weight), outs[-1], norm=norm, bias=gate_bias, activation=activation)
        outs.append(form.linear(next(weight), hidden, residual=outs[-1]))
    logits = form.head(next(weight), norm, outs[-1])
    return [*outs, logits.values if isinstance(logits, ByRow) else logits.T]


def run(form: Products, dtype: Any, x: Any, live: Any = None) -> list[np.ndarray]:
    return layer(form, dtype, weights(form, dtype), x, live)


def rows(count: int, dtype: Any, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTHS[dtype][0])).astype(np.float32)


def test_every_product_is_that_of_xla(products: NativeProducts, dtype: Any) -> None:
    x = rows(17, dtype, 1)
    for found, expected in zip(run(products, dtype, x), run(WEIGHT_LEFT, dtype, x), strict=True):
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, atol=2e-2 * scale)
        assert np.median(np.abs(np.asarray(found) - expected)) <= 1e-3 * scale


def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(products: NativeProducts, dtype: Any) -> None:
    x = rows(256, dtype, 2)
    whole = [np.asarray(each) for each in run(products, dtype, x)]
    for first, count in ((0, 1), (20, 17), (250, 1), (50, 48)):
        for found, expected in zip(run(products, dtype, x[first : first + count]), whole, strict=True):
            assert np.asarray(found).tobytes() == expected[first : first + count].tobytes()


def test_rows_that_are_not_live_change_no_bit(products: NativeProducts, dtype: Any) -> None:
    """Any number of rows is live, in any place, and the other rows have any content."""
    draw, x = np.random.default_rng(6), rows(256, dtype, 6)
    whole = [np.asarray(each) for each in run(products, dtype, x)]
    for count in (*range(65), 100, 255, 256):
        live = np.zeros(len(x), bool)
        live[draw.choice(len(x), count, replace=False)] = True
        found = run(products, dtype, np.where(live[:, None], x, np.nan), live)
        for index, (some, expected) in enumerate(zip(map(np.asarray, found), whole, strict=True)):
            assert some[live].tobytes() == expected[live].tobytes()
            assert index < PLAIN or not some[~live].any()


def test_a_row_with_nan_keeps_it_to_itself(products: NativeProducts, dtype: Any) -> None:
    x = rows(17, dtype, 3)
    clean = run(products, dtype, x)
    x[5, 7] = np.nan
    for found, expected in zip(run(products, dtype, x), clean, strict=True):
        assert np.isnan(np.asarray(found)[5]).any()
        others = np.arange(17) != 5
        assert np.asarray(found)[others].tobytes() == np.asarray(expected)[others].tobytes()


@pytest.mark.parametrize(("row", "weight"), [(-100, -30), (-130, 10), (10, -130)])
def test_denormals_are_zeros(isa: str, row: int, weight: int) -> None:
    """Denormal results, inputs and weights count as zero, because vdpbf16ps treats them so."""
    products = NativeProducts(isa)
    width = WIDTHS[BF16][0]
    weights = jnp.asarray(products.pack(np.full((32, width), 2.0**weight, jnp.bfloat16)))
    x = np.zeros((4, width), np.float32)
    x[0, 3], x[1, 3] = 2.0**row, 2.0 ** min(-weight, 100)
    found = np.asarray(jax.jit(products.linear)(weights, x))
    assert not found[[0, 2, 3]].any()
    assert found[1].all() == (weight > -127)


def test_products_in_eight_bits_are_those_of_xla_to_the_bit(isa: str) -> None:
    """This holds without norms and activations: sums are exact, and rows are rounded alike, tiny ones to zero."""
    products = choose_products("native", MODEL, INT8, isa, parts=PARTS)
    assert isinstance(products, NativeProducts)
    x = rows(21, INT8, 4)
    x[3], x[4, 5:], x[5, 2], x[6] = 0, 0, 1e30, x[6] * 1e-34
    kept, scale = quantize_weight(
        np.random.default_rng(5).standard_normal((320, WIDTHS[INT8][0]), np.float32)
    )
    packed = Quantized(jnp.asarray(products.pack(kept)), jnp.asarray(products.pack(scale, "scale")))
    plain = Quantized(jnp.asarray(kept), jnp.asarray(scale))
    for rounded in (jnp.asarray(x), jnp.asarray(x, jnp.bfloat16)):
        found = np.asarray(jax.jit(products.linear)(packed, rounded))
        expected = np.asarray(jax.jit(WEIGHT_LEFT.linear)(plain, rounded))
        np.testing.assert_array_equal(found, expected)
        assert found.any(axis=1).tolist() == [index not in (3, 6) for index in range(21)]


@pytest.mark.parametrize("count", [VOCABULARY, 2 * 32, 7])
def test_the_rows_of_the_head_are_those_of_the_embedding(isa: str, dtype: Any, count: int) -> None:
    products = NativeProducts(isa)
    values = np.asarray(np.random.default_rng(7).standard_normal((count, WIDTHS[dtype][0])), jnp.bfloat16)
    tokens = jnp.asarray([0, count - 1, 5, 5, count // 2, *range(count)], jnp.int32)
    if dtype == BF16:
        plain, packed = jnp.asarray(values), jnp.asarray(products.pack(values, "head"))
    else:
        kept, scale = quantize_weight(values)
        plain = Quantized(jnp.asarray(kept), jnp.asarray(scale))
        packed = Quantized(
            jnp.asarray(products.pack(kept, "head")), jnp.asarray(products.pack(scale, "scale"))
        )
    found, expected = jax.jit(products.embedded)(packed, tokens), jax.jit(WEIGHT_LEFT.embedded)(plain, tokens)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_what_does_not_fit_is_told() -> None:
    def choose(name: str, model: ModelConfig, dtype: Any, isa: str = "auto") -> Products | None:
        return choose_products(name, model, dtype, isa, parts=PARTS)

    odd = replace(TINY, hidden_size=40)  # no whole vectors of sixteen
    with pytest.raises(ConfigError, match="multiples of 32"):
        choose("native", odd, BF16)
    with pytest.raises(ConfigError, match="bfloat16"):
        choose("native", MODEL, jnp.dtype(jnp.float32))
    with pytest.raises(ConfigError, match="int8 and multiples of 64"):
        choose("native", replace(MODEL, hidden_size=176), INT8)  # no whole groups
    with pytest.raises(ConfigError, match="isa is 'none'"):
        choose("native", MODEL, BF16, "none")
    with pytest.raises(ConfigError, match="use one of auto, "):
        choose("native", MODEL, BF16, "neon" if available()[0].name != "neon" else "avx2")
    assert choose("auto", odd, BF16) is None
    assert choose("auto", MODEL, BF16, "none") is None
    assert choose("xla", MODEL, BF16) is None
