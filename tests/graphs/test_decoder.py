"""Decoder pieces against hand-written NumPy, and the engine against the in-house oracle."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY, tiny_checkpoint
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.graphs.forms import Rope, RopeScaling
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, feature_major
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.ops.norms import apply_rope, rms_norm
from xla_engine.graphs.ops.rope import inverse_frequencies, rope_tables
from xla_engine.sampling_params import SamplingParams


def test_rms_norm() -> None:
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    weight = np.linspace(0.5, 2, 16, dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(
        np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)), expected, rtol=1e-5
    )


def test_rope_rotates_pairs_by_position() -> None:
    """Half-split pairs (i, i + Dh/2) turn by position times frequency; norms and position 0 are kept."""
    (table,) = rope_tables(TINY, 32)
    x = np.random.default_rng(1).standard_normal((32, 2, TINY.head_dim)).astype(np.float32)
    turned = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(table)))
    np.testing.assert_array_equal(turned[0], x[0])
    half = TINY.head_dim // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(32)[:, None] * inverse_frequencies(Rope(10000.0, None, TINY.head_dim), 32)
    expected = pairs * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(turned[..., :half], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., half:], expected.imag, atol=1e-5)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    scaling = RopeScaling(
        rope_type="llama3",
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_position_embeddings=128,
    )
    before, after = (inverse_frequencies(Rope(10000.0, each, 64), 512) for each in (None, scaling))
    wavelength = 2 * np.pi / before
    np.testing.assert_allclose(after[wavelength < 128 / 4], before[wavelength < 128 / 4])
    np.testing.assert_allclose(after[wavelength > 128], before[wavelength > 128] / 8, rtol=1e-6)
    between = (wavelength >= 128 / 4) & (wavelength <= 128)
    assert between.any() and ((after <= before) & (after >= before / 8.001))[between].all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("count", [8, 128])
def test_both_projection_forms_are_the_product(dtype: jnp.dtype, count: int) -> None:
    draw = np.random.default_rng(2)
    weight = jnp.asarray(draw.standard_normal((96, 48)), dtype)
    x = jnp.asarray(draw.standard_normal((count, 48)), jnp.float32)
    expected = np.asarray(x.astype(dtype), np.float64) @ np.asarray(weight, np.float64).T
    for form in (WEIGHT_LEFT, ROWS_LEFT):
        np.testing.assert_allclose(np.asarray(form.linear(weight, x)), expected, atol=2e-4)
    np.testing.assert_allclose(np.asarray(feature_major(weight, x)).T, expected, atol=2e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="level B is promised on CPUs")
def test_the_number_of_rows_changes_no_bit_of_the_gated_mlp() -> None:
    """With unit weights the products are exact, and the result is silu(x) * x."""
    unit = jnp.eye(128)
    x = np.random.default_rng(0).standard_normal((768, 128)).astype(np.float32) * 3
    gated = jax.jit(WEIGHT_LEFT.gated)

    def by(count: int) -> np.ndarray:
        parts = np.split(x, len(x) // count)
        return np.concatenate([np.asarray(gated(jnp.tile(unit, (2, 1)), part).values.T) for part in parts])

    expected = by(16)
    for count in (8, 12, 32):
        np.testing.assert_array_equal(by(count).view(np.int32), expected.view(np.int32))


def test_parameters_are_named_once_and_names_are_checked() -> None:
    shapes = parameter_shapes(TINY)
    assert shapes["layers.1.gate_up"] == (2 * TINY.intermediate_size, TINY.hidden_size)
    assert shapes["head"] == (TINY.vocab_size, TINY.hidden_size)
    weights = dict(tiny_checkpoint().weights)
    leaves = ModelSpec(TINY, jnp.dtype(jnp.bfloat16)).leaves
    leaves.check_names(weights)
    assert [weights[name].shape for name in leaves] == list(shapes.values())
    del weights["layers.0.qkv"]
    with pytest.raises(KeyError, match=r"layers\.0\.qkv"):
        leaves.check_names(weights)


def test_engine_agrees_with_the_cacheless_forward_pass(make_engine: Callable[..., XlaBatchEngine]) -> None:
    """float32, greedy, prompts over several chunks: same tokens, logprobs within rounding."""
    reference = ForwardPass(tiny_checkpoint("float32"))
    engine = make_engine(dtype="float32")
    draw = np.random.default_rng(4)
    for length in (1, 2, 15, 16, 17, 40, 70):
        prompt = draw.integers(1, TINY.vocab_size, length).tolist()
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True))
        (output,) = engine.drain()
        completion = output.outputs[0]
        sequence = [*prompt, *completion.token_ids]
        logits = reference.logits(sequence)[length - 1 : -1].astype(np.float64)
        assert completion.token_ids == tuple(logits.argmax(axis=1).tolist())
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = logprobs[np.arange(12), list(completion.token_ids)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
