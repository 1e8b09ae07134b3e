"""Products on matrix tiles: against XLA's, and the law that a row's bits do not depend on the number of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphs.projection import WEIGHT_LEFT, Activation, Norm, Products
from graphs.projection_native import NativeProducts
from tests.conftest import TINY
from xla_engine.backends import choose_products
from xla_engine.errors import ConfigError

WIDTH, INNER, VOCABULARY = 96, 160, 199  # whole tiles, odd numbers of them; the head ends within a tile
MODEL = replace(TINY, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=6, head_dim=16)
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(scope="module")
def products() -> NativeProducts:
    try:
        found = choose_products("native", MODEL, BF16)
    except ConfigError as error:
        pytest.skip(str(error))
    assert isinstance(found, NativeProducts)
    return found


def layer(form: Products, x: Any) -> list[np.ndarray]:
    """Each product once, in the order of a layer: row-major results."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape, np.float32) * 0.2, jnp.bfloat16)

    def weight(*shape: int) -> np.ndarray:
        return form.pack(drawn(*shape))

    norm = Norm(jnp.asarray(rng.standard_normal(WIDTH, np.float32)), 1e-5)
    bias = jnp.asarray(rng.standard_normal(160, np.float32))
    qkv = form.linear(weight(160, WIDTH), x, norm=norm, bias=bias)
    attended = jnp.tanh(qkv[:, :WIDTH])
    added = form.linear(weight(WIDTH, WIDTH), attended.astype(jnp.bfloat16), residual=x)
    plain = form.linear(weight(WIDTH, WIDTH), attended)
    outs = [qkv, added, plain]
    forms: tuple[tuple[Activation, jax.Array | None], ...] = (
        ("silu", None),
        ("gelu_tanh", None),
        ("silu", jnp.tile(bias, 3)[: 2 * INNER]),
    )
    for activation, gate_bias in forms:
        hidden = form.gated(
            weight(2 * INNER, WIDTH), outs[-1], norm=norm, bias=gate_bias, activation=activation
        )
        outs.append(form.linear(weight(WIDTH, INNER), hidden, residual=outs[-1]))
    return [*outs, form.head(drawn(VOCABULARY, WIDTH), norm, outs[-1]).T]


def test_every_product_is_that_of_xla(products: NativeProducts) -> None:
    x = np.random.default_rng(1).standard_normal((24, WIDTH)).astype(np.float32)
    ours, theirs = (jax.jit(layer, static_argnums=0)(form, x) for form in (products, WEIGHT_LEFT))
    for found, expected in zip(ours, theirs, strict=True):
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected, atol=2e-2 * scale)
        assert np.median(np.abs(np.asarray(found) - expected)) <= 1e-3 * scale


def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(products: NativeProducts) -> None:
    x = np.random.default_rng(2).standard_normal((100, WIDTH)).astype(np.float32)
    whole = [np.asarray(each) for each in jax.jit(layer, static_argnums=0)(products, x)]
    for first, count in ((0, 1), (3, 8), (7, 13), (16, 16), (20, 17), (30, 33), (50, 48)):
        part = jax.jit(layer, static_argnums=0)(products, x[first : first + count])
        for found, expected in zip(part, whole, strict=True):
            assert np.asarray(found).tobytes() == expected[first : first + count].tobytes()


def test_a_row_with_nan_keeps_it_to_itself(products: NativeProducts) -> None:
    x = np.random.default_rng(3).standard_normal((8, WIDTH)).astype(np.float32)
    clean = jax.jit(layer, static_argnums=0)(products, x)
    x[5, 7] = np.nan
    for found, expected in zip(jax.jit(layer, static_argnums=0)(products, x), clean, strict=True):
        assert np.isnan(np.asarray(found)[5]).any()
        others = np.arange(8) != 5
        assert np.asarray(found)[others].tobytes() == np.asarray(expected)[others].tobytes()


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ConfigError, match="multiples of 32"):
        choose_products("native", TINY, BF16)
    with pytest.raises(ConfigError, match="bfloat16"):
        choose_products("native", MODEL, jnp.dtype(jnp.float32))
    assert choose_products("auto", TINY, BF16) is None
    assert choose_products("xla", MODEL, BF16) is None
