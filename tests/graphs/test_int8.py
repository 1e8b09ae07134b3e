"""Weights in eight bits: the arithmetic, both operand orders, and the laws on an engine that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY, TINY_ENGINE
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig, RoutedExperts
from xla_engine.graphs.ops.int8 import Quantized, quantize_rows, quantize_weight
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, FeatureMajor, Norm
from xla_engine.runner.backends import choose_products, make_spec

DRAW = np.random.default_rng(0)


def test_a_weight_is_within_half_a_step_of_its_int8_values() -> None:
    weight = DRAW.standard_normal((5000, 40)).astype(np.float32)
    weight[7] = 0
    values, scale = quantize_weight(weight)
    assert values.dtype == np.int8 and np.abs(values).max() == 127
    assert scale[7] == 1 and not values[7].any()
    assert np.all(np.abs(values * scale[:, None] - weight) <= 0.5001 * scale[:, None])


def test_rows_are_quantised_by_their_own_largest_value() -> None:
    x = DRAW.standard_normal((6, 64)).astype(np.float32) * np.array([[1e-6], [1], [1e6], [0], [3], [np.nan]])
    values, scale = (np.asarray(each) for each in quantize_rows(jnp.asarray(x, jnp.float32), 1))
    np.testing.assert_allclose(scale[[0, 1, 2, 4]], np.abs(x[[0, 1, 2, 4]]).max(1) / 127, rtol=1e-6)
    assert not values[3].any() and 0 < scale[3] < 1e-30
    assert np.isnan(scale[5])
    assert np.all(np.abs(values[:5] * scale[:5, None] - x[:5]) <= 0.5001 * scale[:5, None])
    turned = quantize_rows(jnp.asarray(x[:5].T, jnp.float32), 0)
    np.testing.assert_array_equal(turned[0].T, values[:5])


def test_both_operand_orders_give_the_same_bits_near_the_product() -> None:
    weight = DRAW.standard_normal((96, 64)).astype(np.float32)
    kept = Quantized(*map(jnp.asarray, quantize_weight(weight)))
    x = jnp.asarray(DRAW.standard_normal((24, 64)), jnp.float32)
    norm = Norm(jnp.ones(64), 1e-5)
    left, right = (np.asarray(form.linear(kept, x, norm=norm)) for form in (WEIGHT_LEFT, ROWS_LEFT))
    np.testing.assert_array_equal(left.view(np.int32), right.view(np.int32))
    normed = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
    assert np.abs(left - normed @ weight.T).max() < 0.02 * np.abs(normed @ weight.T).max()
    np.testing.assert_array_equal(WEIGHT_LEFT.head(kept, norm, x), left.T)
    gated = WEIGHT_LEFT.gated(kept, x), ROWS_LEFT.gated(kept, x)
    assert isinstance(gated[0], FeatureMajor) and not isinstance(gated[1], FeatureMajor)
    np.testing.assert_allclose(gated[0].values.T, gated[1], rtol=1e-5, atol=1e-5)


WIDE = replace(TINY, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("backend", "model"), [pytest.param("xla", TINY, marks=pytest.mark.full), ("auto", WIDE)]
)
def test_law_1_holds_in_eight_bits(
    make_engine: Callable[..., XlaBatchEngine], backend: str, model: ModelConfig
) -> None:
    """By XLA's products, and by C++, for which the wide model's layers are whole blocks."""
    config = replace(TINY_ENGINE, quantization="int8", attention_backend=backend, linear_backend=backend)
    engine = make_engine(config, model=model)
    products = choose_products(backend, model, jnp.dtype(jnp.int8))
    assert engine.runner.spec.products == products and (model is WIDE or products is None)
    assert (
        sum(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(engine.runner.weights.leaves))
        == 4 * TINY.num_hidden_layers + 2
    )
    report = verify(engine, requests=30, schedules=2, seed=1, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())


def test_what_cannot_be_kept_in_eight_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig(quantization="int4")
    bf16: Any = jnp.dtype(jnp.bfloat16)
    with pytest.raises(ConfigError, match="int8 and multiples of 64"):
        make_spec(
            EngineConfig(quantization="int8", linear_backend="native"), replace(TINY, hidden_size=40), bf16
        )
    routed = replace(
        TINY, experts=RoutedExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )
    with pytest.raises(ConfigError, match="dense models"):
        make_spec(EngineConfig(quantization="int8"), routed, bf16)
