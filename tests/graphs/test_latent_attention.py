"""Attention to keys that are the values, in C++: the bits of values that are stored apart, and products by head."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import HERE
from tests.support.models import TINY
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import AttentionForm, LatentForm
from xla_engine.graphs.linear.by_head import by_head
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import WEIGHT_LEFT, Products
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.runner.native_library import build as native

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of the CPU")
S, T = 768, 128  # positions of a slot, of a lane
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=HERE)
def isa(request: pytest.FixtureRequest) -> str:
    try:
        return native.register(request.param, {*native.ATTENTION, "linear_bf16"})
    except native.NativeBuildError as error:
        pytest.skip(str(error))


def model_of(width: int, *, latent: bool) -> ModelConfig:
    rotary = width // 3 // 2 * 2
    form = LatentForm(
        q_lora_rank=0, kv_lora_rank=width - rotary, qk_nope_head_dim=8, qk_rope_head_dim=rotary, v_head_dim=8
    )
    one = replace(TINY, head_dim=width, num_key_value_heads=1, stored_parts=1)
    return replace(one, latent=form) if latent else one


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def attend(attention: Any, form: AttentionForm, layer: LayerCache, qkv: Any, lanes: Extents) -> Any:
    """A call of lanes of the same width, whose heads are not rotated."""
    number, half = len(lanes.slot), layer_width(layer, qkv, form) // 2
    rope = jnp.broadcast_to(jnp.array([[1.0], [0.0]]), (number, qkv.shape[0] // number, 2, half))
    call = AttentionCall(form, AttentionWeights(), rope, S, jnp.dtype(jnp.bfloat16))
    return attention.attend_prefill(layer, qkv, call, lanes)


def layer_width(layer: LayerCache, qkv: Any, form: AttentionForm) -> int:
    """Features of a head, which the scale tells."""
    return round(form.scale**-2)


def run(
    attention: Any, model: ModelConfig, dtype: Any, rows: Array, parts: list[int]
) -> tuple[Array, LayerCache]:
    """Attention of `rows [N, F]` in slot 1, cut into lanes of up to T rows; other lanes are shorter sequences."""
    form = replace(model.attention(0), scale=model.head_dim**-0.5)
    layer = attention.make_store(model, [0], 3, S, jnp.dtype(dtype))
    if dtype != jnp.int8:
        layer = LayerCache(*(jnp.full_like(leaf, np.nan) for leaf in layer))
        if isinstance(attention, XlaAttention):
            layer = attention.clear_values(layer, jnp.arange(3), jnp.ones(3, bool))
    found, at = [], 0
    for size in parts:
        width = 1 if size == 1 else T
        qkv = np.zeros((2, width, rows.shape[1]), np.float32)
        qkv[0, :size], qkv[1, 0] = rows[at : at + size], rows[at // 7]
        lanes = Extents(*np.array([[1, 2], [at, at // T], [size, 1]], np.int32))
        layer, out = attend(attention, form, layer, qkv.reshape(2 * width, -1), lanes)
        found.append(np.asarray(out).astype(np.float32).reshape(2, width, -1)[0, :size])
        at += size
    return np.concatenate(found), layer


@pytest.mark.parametrize(
    ("width", "heads", "dtype"),
    [(48, 5, jnp.float32), (96, 20, jnp.bfloat16), (576, 16, jnp.bfloat16), (64, 3, jnp.int8)],
    ids=str,
)
def test_the_bits_are_those_of_values_that_are_stored_apart(
    isa: str, width: int, heads: int, dtype: Any
) -> None:
    """Over stale NaN, in chunks and one by one, for sequences of several segments."""
    attention = NativeAttention(isa, cache_dtype=jnp.dtype(dtype))
    generator = np.random.default_rng(width)
    rows = generator.standard_normal((600, (heads + 1) * width)).astype(np.float32)
    apart, kept = run(attention, model_of(width, latent=False), dtype, rows, [T] * 4 + [88])
    for parts in ([T] * 4 + [88], [3, 100, T, T, 101, *[1] * 5, 120, *[1] * 15]):
        found, layer = run(attention, model_of(width, latent=True), dtype, rows, parts)
        assert found.tobytes() == apart.tobytes()
        assert layer.values.size == 0 and layer.keys.nbytes == kept.keys.nbytes


def test_pure_jax_gives_nearly_the_same(isa: str) -> None:
    rows = np.random.default_rng(1).standard_normal((300, 6 * 48)).astype(np.float32)
    model = model_of(48, latent=True)
    (found, _), (expected, layer) = (
        run(each, model, jnp.bfloat16, rows, [T, T, 40, 1, 1, 1, 1])
        for each in (NativeAttention(isa), XlaAttention())
    )
    np.testing.assert_allclose(found, expected[: len(found)], atol=2e-2)
    assert layer.values.size == 0


def run_by_head(products: Products, weight: Array, x: Array, live: Array | None = None) -> Array:
    form = products if live is None else products.for_rows(jnp.asarray(live))
    packed = jnp.asarray(products.pack(weight))
    return np.asarray(jax.jit(lambda weight, x: by_head(form, weight, x))(packed, x))


@pytest.mark.parametrize(("heads", "features", "width"), [(3, 64, 32), (5, 96, 352)])
def test_products_by_head(isa: str, heads: int, features: int, width: int) -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((heads * features, width)).astype(jnp.bfloat16)
    x = generator.standard_normal((97, heads, width)).astype(np.float32)
    rounded = x.astype(jnp.bfloat16).astype(np.float64)
    expected = np.einsum("nhd,hfd->nhf", rounded, weight.astype(np.float64).reshape(heads, features, width))
    products = NativeProducts(isa)
    found = run_by_head(products, weight, x)
    for each in (found, run_by_head(WEIGHT_LEFT, weight, x)):
        np.testing.assert_allclose(each, expected, atol=1e-4 * width)
    for first, count in ((0, 1), (5, 4), (30, 17)):
        part = slice(first, first + count)
        assert run_by_head(products, weight, x[part]).tobytes() == found[part].tobytes()
        assert run_by_head(products, weight, x[part].astype(jnp.bfloat16)).tobytes() == found[part].tobytes()
    live = np.arange(97) % 3 == 1
    some = run_by_head(products, weight, np.where(live[:, None, None], x, np.nan), live)
    assert some[live].tobytes() == found[live].tobytes() and not some[~live].any()
