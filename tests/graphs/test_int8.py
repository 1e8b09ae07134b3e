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
from tests.support.tensor_parallel import MODELS
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, FeatureMajor, Norm
from xla_engine.graphs.ops.int8 import GROUP, Quantized, dequantized, quantize_rows, quantize_weight, rotated
from xla_engine.runner.backends import choose_products, make_spec

DRAW = np.random.default_rng(0)


def test_a_weight_is_within_half_a_step_of_its_int8_values() -> None:
    weight = DRAW.standard_normal((5000, 2 * GROUP + 8)).astype(np.float32)
    weight[7, :GROUP] = 0
    values, scale = quantize_weight(weight)
    assert values.dtype == np.int8 and np.abs(values).max() == 127 and scale.shape == (5000, 3)
    assert scale[7, 0] == 1 and not values[7, :GROUP].any()
    steps = np.repeat(scale.astype(np.float32), GROUP, axis=1)[:, : weight.shape[1]]
    assert np.all(np.abs(values * steps - rotated(weight, 1)) <= 0.5001 * steps)
    assert np.abs(np.asarray(jax.jit(dequantized)(*map(jnp.asarray, (values, scale)))) - weight).max() < 0.05
    several = quantize_weight(weight.reshape(5, 1000, -1))
    np.testing.assert_array_equal(several[0].reshape(values.shape), values)
    np.testing.assert_array_equal(several[1].reshape(scale.shape), scale)


def test_groups_of_rows_are_quantised_by_their_own_largest_value() -> None:
    factors = np.repeat([[1e-6, 1], [1, 1e6], [0, 3], [np.nan, 1]], GROUP, axis=1)
    x = DRAW.standard_normal((4, 2 * GROUP)).astype(np.float32) * factors
    quantise = jax.jit(quantize_rows, static_argnums=1)
    values, scale = (np.asarray(each) for each in quantise(jnp.asarray(x, jnp.float32), 1))
    turned = np.asarray(jax.jit(rotated, static_argnums=1)(jnp.asarray(x, jnp.float32), 1))
    largest = np.abs(turned).reshape(4, 2, GROUP).max(2)
    assert np.isnan(scale[3, 0]) and not values[2, :GROUP].any() and 0 < scale[2, 0] < 1e-30
    np.testing.assert_allclose(scale[largest > 0], largest[largest > 0] / 127, rtol=1e-4)
    steps = np.repeat(scale, GROUP, axis=1)
    assert np.all(np.abs(values[:3] * steps[:3] - turned[:3]) <= 0.505 * steps[:3])
    columns = quantise(jnp.asarray(x[:3].T, jnp.float32), 0)
    np.testing.assert_array_equal(columns[0].T, values[:3])
    np.testing.assert_array_equal(columns[1].T, scale[:3])


@pytest.mark.full
def test_both_operand_orders_give_the_same_bits_near_the_product() -> None:
    weight = DRAW.standard_normal((96, 72)).astype(np.float32)  # the last group is a short one
    kept = Quantized(*map(jnp.asarray, quantize_weight(weight)))
    x = jnp.asarray(DRAW.standard_normal((24, 72)), jnp.float32)
    norm = Norm(jnp.ones(72), 1e-5)
    left, right = (np.asarray(jax.jit(form.linear)(kept, x, norm=norm)) for form in (WEIGHT_LEFT, ROWS_LEFT))
    np.testing.assert_array_equal(left.view(np.int32), right.view(np.int32))
    normed = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
    assert np.abs(left - normed @ weight.T).max() < 0.01 * np.abs(normed @ weight.T).max()
    np.testing.assert_array_equal(jax.jit(WEIGHT_LEFT.head)(kept, norm, x), left.T)
    gated = jax.jit(WEIGHT_LEFT.gated)(kept, x), jax.jit(ROWS_LEFT.gated)(kept, x)
    assert isinstance(gated[0], FeatureMajor) and not isinstance(gated[1], FeatureMajor)
    np.testing.assert_allclose(gated[0].values.T, gated[1], rtol=1e-5, atol=1e-5)


WIDE = replace(TINY, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)


FULL = pytest.mark.full


def whole(model: ModelConfig) -> ModelConfig:
    """A model whose widths are whole groups, as the C++ products need."""
    experts = None if model.experts is None else replace(model.experts, moe_intermediate_size=128)
    return replace(model, intermediate_size=192, experts=experts)


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        pytest.param("xla", TINY, marks=pytest.mark.release),
        ("auto", WIDE),
        pytest.param("xla", MODELS["routed"], marks=FULL),
        *(
            pytest.param("auto", whole(MODELS[name]), marks=FULL)
            for name in ("routed", "clamped", "recurrent")
        ),
    ],
)
def test_law_1_holds_in_eight_bits(
    make_engine: Callable[..., XlaBatchEngine], backend: str, model: ModelConfig
) -> None:
    """With XLA's products, and with those of C++, which need widths of whole groups; only TINY lacks them."""
    one_bucket = (512,)  # of keys: products in eight bits do not see them, and each is compiled by itself
    config = replace(TINY_ENGINE, quantization="int8", key_buckets=one_bucket)
    config = replace(config, attention_backend=backend, linear_backend=backend)
    engine = make_engine(config, model=model)
    products = choose_products(backend, model, jnp.dtype(jnp.int8), parts=("linear_int8",))
    assert engine.runner.spec.products == products and (backend == "auto") == (products is not None)
    # files of other forms are refused
    assert engine.runner.platform["int8"] == f"groups of {GROUP}, rotated whole"
    leaves = engine.runner.spec.leaves
    kept = {name for name, leaf in leaves.items() if leaf.dtype == jnp.int8}
    assert kept == {name for name in leaves if name + "_scale" in leaves}
    plain = {name for name, leaf in leaves.items() if leaf.dtype == jnp.bfloat16 and leaf.role != "scale"}
    assert {name.rsplit(".")[-1] for name in plain} <= {"router", "shared_gate", "convolution"}
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
