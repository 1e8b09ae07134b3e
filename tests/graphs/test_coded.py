"""Coded weights: every value is ggml's, rounded to bf16, and products have the bits of bf16 weights."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.gguf_files import Kind, random_blocks
from tests.support.instruction_sets import NAMES, NATIVE_ISAS, registered
from xla_engine.graphs.linear.coded import KINDS, Coded, CodedForm, coded_form
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm
from xla_engine.model_loader.gguf import coding

FEATURES, WIDTH = 128, 512


def coded(stored: list[tuple[str, int]], raw: list[np.ndarray], features: int | None = None) -> Coded:
    """A weight of parts, each in a kind of its own."""
    form = coded_form(tuple(stored), WIDTH)
    assert form is not None
    blocks = []
    for (kind, _), rows in zip(stored, raw, strict=True):
        padded = np.pad(rows, ((0, -len(rows) % 16), (0, 0)))
        blocks.append(coding.coded_blocks(kind, padded, WIDTH)[0].reshape(-1))
    flat = np.concatenate([form.header(), *blocks])
    return Coded(jnp.asarray(np.pad(flat, (0, form.nbytes - len(flat)))), form)


def dequantised(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, Kind[kind]).astype(ml_dtypes.bfloat16)


def rows_of(products: NativeProducts, weight: Coded) -> np.ndarray:
    tokens = jnp.arange(weight.form.features, dtype=jnp.int32)
    return np.asarray(products.embedded(weight, tokens)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_values_and_products_have_the_bits_of_the_dequantised_file(isa: str) -> None:
    products = NativeProducts(str(registered(isa, "linear_coded", "linear_bf16")))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((29, WIDTH)), jnp.float32)
    norm = Norm(jnp.linspace(0.5, 2, WIDTH), 1e-5)
    for seed, kind in enumerate(KINDS):
        raw = random_blocks((FEATURES, WIDTH), Kind[kind], seed)
        weight, plain = coded([(kind, FEATURES)], [raw]), dequantised(kind, raw)
        found = rows_of(products, weight)
        np.testing.assert_array_equal(found.view(np.uint16), plain.view(np.uint16), err_msg=kind)
        packed = jnp.asarray(products.pack(plain))
        head = jnp.asarray(products.pack_head(plain))
        for rows in (1, 2, 13, 29):
            for one, other in (
                (products.linear(weight, x[:rows]), products.linear(packed, x[:rows])),
                (products.gated(weight, x[:rows], norm=norm), products.gated(packed, x[:rows], norm=norm)),
                (products.head(weight, norm, x[:rows]).values, products.head(head, norm, x[:rows]).values),
            ):
                bits = [np.asarray(each, np.float32).view(np.uint32) for each in (one, other)]
                np.testing.assert_array_equal(*bits, err_msg=f"{kind}, {rows} rows")


def best() -> NativeProducts:
    if not NAMES:
        pytest.skip("no C++ products on this platform")
    return NativeProducts(str(registered(NAMES[0], "linear_coded", "linear_bf16")))


def test_a_leaf_of_several_kinds_and_of_no_whole_tasks() -> None:
    products, kinds = best(), ("Q4_K", "Q8_0", "Q6_K")
    counts = (48, 16, 25)
    raw = [
        random_blocks((count, WIDTH), Kind[kind], count) for kind, count in zip(kinds, counts, strict=True)
    ]
    weight = coded(list(zip(kinds, counts, strict=True)), raw)
    assert weight.form.runs == (("Q4_K", 3), ("Q8_0", 1), ("Q6_K", 2)) and weight.form.features == 89
    plain = np.concatenate([dequantised(kind, rows) for kind, rows in zip(kinds, raw, strict=True)])
    np.testing.assert_array_equal(rows_of(products, weight).view(np.uint16), plain.view(np.uint16))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, WIDTH)), jnp.float32)
    one, other = products.linear(weight, x), products.linear(jnp.asarray(products.pack_head(plain)), x)
    np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(other).view(np.uint32))


def test_what_devices_hold_has_one_form_or_none() -> None:
    stored = (("Q4_0", 64), ("Q8_0", 64))
    both = np.array([[*range(32), *range(64, 96)], [*range(32, 64), *range(96, 128)]])
    assert coded_form(stored, 64, both) == CodedForm(64, 64, (("Q4_0", 2), ("Q8_0", 2)))
    padded = np.array([[*range(32), *[-1] * 32], [*range(32, 64), *range(64, 96)]])
    assert coded_form(stored, 64, padded) == CodedForm(64, 64, (("Q4_0", 2), ("Q8_0", 2)))
    assert coded_form(stored, 64, np.arange(128).reshape(2, 64)) is None  # the devices differ
    assert coded_form((("Q4_0", 8), ("Q8_0", 24)), 64) is None  # within a block
    assert coded_form((("Q4_K", 32),), 320) is None and coded_form((("F16", 32),), 256) is None
    assert coded_form(tuple((kind, 32) for kind in ("Q4_0", "Q8_0") * 4), 64) is None  # too many runs


@pytest.mark.parametrize(
    "fault",
    [
        lambda packed, run: _swapped(packed, run),
        lambda packed, run: np.roll(_apart(packed, run), 1, axis=-1),
    ],
    ids=["nibbles swapped", "codes one place off"],
)
def test_a_wrong_order_of_codes_shows(fault: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """Planted faults: the first test would fail for them."""
    raw = random_blocks((32, WIDTH), Kind.Q4_K, 7)
    with mock.patch.object(coding, "_nibbles", fault):
        found = rows_of(best(), coded([("Q4_K", 32)], [raw]))
    assert (found.view(np.uint16) != dequantised("Q4_K", raw).view(np.uint16)).mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_scales_one_group_off_show(kind: str) -> None:
    raw = random_blocks((32, WIDTH), Kind[kind], 7)
    weight = coded([(kind, 32)], [raw])
    own, values = KINDS[kind], np.array(weight.values)
    size, groups = weight.form.block_bytes(kind), WIDTH // KINDS[kind].group
    scales = values[64:].reshape(2, size)[:, groups * (own.low + own.high) :][:, : groups * own.scales]
    scales[...] = np.roll(scales.reshape(2, groups, -1), 1, axis=1).reshape(scales.shape)
    found = rows_of(best(), Coded(jnp.asarray(values), weight.form))
    assert (found.view(np.uint16) != dequantised(kind, raw).view(np.uint16)).mean() > 0.5


_apart = coding._nibbles


def _swapped(packed: np.ndarray, run: int) -> np.ndarray:
    return _apart(packed >> 4 | packed << 4, run)
