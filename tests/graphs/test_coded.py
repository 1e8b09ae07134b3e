"""Coded weights: every value is ggml's, rounded to bf16, and products have the bits of bf16 weights.

In the order "fours", products have the bits of exact sums of integers, which NumPy emulates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support import packing
from tests.support.coded_blocks import block_bytes, dequantised_rows, random_rows
from tests.support.instruction_sets import NAMES, NATIVE_ISAS, registered
from xla_engine.graphs.experts.routing import Experts, Route
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm, Weight
from xla_engine.graphs.ops.coded import KINDS, Coded, CodedForm, Order, coded_form

FEATURES, WIDTH = 128, 512


def coded(stored: list[tuple[str, int]], raw: list[np.ndarray], order: Order = "pairs") -> Coded:
    """A weight of several parts, each of a different kind."""
    form = coded_form(tuple(stored), WIDTH, order=order)
    assert form is not None
    blocks = []
    for (kind, _), rows in zip(stored, raw, strict=True):
        padded = np.pad(rows, ((0, -len(rows) % 16), (0, 0)))
        blocks.append(packing.coded_blocks(kind, padded, WIDTH, order)[0].reshape(-1))
    flat = np.concatenate([form.header(), *blocks])
    return Coded(jnp.asarray(np.pad(flat, (0, form.nbytes - len(flat)))), form)


def dequantised(kind: str, raw: np.ndarray) -> np.ndarray:
    return dequantised_rows(kind, raw).astype(ml_dtypes.bfloat16)


def rows_of(products: NativeProducts, weight: Coded) -> np.ndarray:
    tokens = jnp.arange(weight.form.features, dtype=jnp.int32)
    return np.asarray(products.embedded(weight, tokens)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_values_and_products_have_the_bits_of_the_dequantised_file(isa: str) -> None:
    products = NativeProducts(str(registered(isa, "linear_coded", "linear_bf16")))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((43, WIDTH)), jnp.float32)
    norm = Norm(jnp.linspace(0.5, 2, WIDTH), 1e-5)

    def products_of(weight: Weight, head: Weight, x: jax.Array) -> list[jax.Array]:  # one program a kind
        found = []
        for some in (x[:rows] for rows in (1, 2, 3, 7, 12, 13, 29, 43)):
            found += [products.linear(weight, some), products.gated(weight, some, norm=norm)]
            found.append(products.head(head, norm, some).values)
        return found

    for seed, kind in enumerate(KINDS):
        raw = random_rows((FEATURES, WIDTH), kind, seed)
        weight, plain = coded([(kind, FEATURES)], [raw]), dequantised(kind, raw)
        found = rows_of(products, weight)
        np.testing.assert_array_equal(found.view(np.uint16), plain.view(np.uint16), err_msg=kind)
        packed = jnp.asarray(products.pack(plain))
        head = jnp.asarray(products.pack(plain, "head"))
        one, other = (jax.jit(partial(products_of, *each))(x) for each in ((weight, weight), (packed, head)))
        for found_of_one, found_of_other in zip(one, other, strict=True):
            bits = [np.asarray(each, np.float32).view(np.uint32) for each in (found_of_one, found_of_other)]
            np.testing.assert_array_equal(*bits, err_msg=f"{kind}, {len(found_of_one)} rows")


def best() -> NativeProducts:
    if not NAMES:
        pytest.skip("no C++ products on this platform")
    return NativeProducts(str(registered(NAMES[0], "linear_coded", "linear_fours", "linear_bf16")))


def test_a_leaf_of_several_kinds_and_of_no_whole_tasks() -> None:
    products, kinds = best(), ("Q4_K", "Q8_0", "Q6_K")
    counts = (48, 16, 25)
    raw = [random_rows((count, WIDTH), kind, count) for kind, count in zip(kinds, counts, strict=True)]
    weight = coded(list(zip(kinds, counts, strict=True)), raw)
    assert weight.form.runs == (("Q4_K", 3), ("Q8_0", 1), ("Q6_K", 2)) and weight.form.features == 89
    plain = np.concatenate([dequantised(kind, rows) for kind, rows in zip(kinds, raw, strict=True)])
    np.testing.assert_array_equal(rows_of(products, weight).view(np.uint16), plain.view(np.uint16))
    head = jnp.asarray(products.pack(plain, "head"))
    for count in (5, 43):
        x = jnp.asarray(np.random.default_rng(1).standard_normal((count, WIDTH)), jnp.float32)
        one, other = products.linear(weight, x), products.linear(head, x)
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
    """The first test would detect these planted faults."""
    raw = random_rows((32, WIDTH), "Q4_K", 7)
    with mock.patch.object(packing, "_nibbles", fault):
        found = rows_of(best(), coded([("Q4_K", 32)], [raw]))
    assert (found.view(np.uint16) != dequantised("Q4_K", raw).view(np.uint16)).mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_scales_one_group_off_show(kind: str) -> None:
    raw = random_rows((32, WIDTH), kind, 7)
    weight = coded([(kind, 32)], [raw])
    own, values = KINDS[kind], np.array(weight.values)
    size, groups = weight.form.block_bytes(kind), WIDTH // KINDS[kind].group
    scales = values[64:].reshape(2, size)[:, groups * (own.low + own.high) :][:, : groups * own.scales]
    scales[...] = np.roll(scales.reshape(2, groups, -1), 1, axis=1).reshape(scales.shape)
    found = rows_of(best(), Coded(jnp.asarray(values), weight.form))
    assert (found.view(np.uint16) != dequantised(kind, raw).view(np.uint16)).mean() > 0.5


_apart = packing._nibbles


def _swapped(packed: np.ndarray, run: int) -> np.ndarray:
    return _apart(packed >> 4 | packed << 4, run)


# Of each kind: where the bytes of a block are, and bytes of which each code means 1.
_HALF = {"d": slice(0, 2)}
_FIELDS: dict[str, tuple[dict[str, slice], dict[str, int]]] = {
    "Q4_0": (_HALF | {"codes": slice(2, 18)}, {"codes": 0x99}),
    "Q4_1": (_HALF | {"least": slice(2, 4), "codes": slice(4, 20)}, {"codes": 0x11}),
    "Q5_0": (_HALF | {"high": slice(2, 6), "codes": slice(6, 22)}, {"codes": 0x11, "high": 0xFF}),
    "Q5_1": (
        _HALF | {"least": slice(2, 4), "high": slice(4, 8), "codes": slice(8, 24)},
        {"codes": 0x11, "high": 0},
    ),
    "Q8_0": (_HALF | {"codes": slice(2, 34)}, {"codes": 1}),
    "Q4_K": (
        _HALF | {"least": slice(2, 4), "scales": slice(4, 16), "codes": slice(16, 144)},
        {"codes": 0x11},
    ),
    "Q5_K": (
        _HALF
        | {"least": slice(2, 4), "scales": slice(4, 16), "high": slice(16, 48), "codes": slice(48, 176)},
        {"codes": 0x11, "high": 0},
    ),
    "Q6_K": (
        {"codes": slice(0, 128), "high": slice(128, 192), "scales": slice(192, 208), "d": slice(208, 210)},
        {"codes": 0x11, "high": 0xAA},
    ),
    "IQ4_NL": (_HALF | {"codes": slice(2, 18)}, {"codes": 0x88}),
    "A4": (_HALF | {"least": slice(2, 4), "codes": slice(4, 20)}, {"codes": 0x11}),
    "A8": (_HALF | {"least": slice(2, 4), "codes": slice(4, 36)}, {"codes": 1}),
    "IQ4_XS": (_HALF | {"scales": slice(2, 8), "codes": slice(8, 136)}, {"codes": 0x88}),
    "MXFP4": ({"power": slice(0, 1), "codes": slice(1, 17)}, {"codes": 0x11}),
}
_ONES = {  # scales of scales, and minima of 0
    "Q4_K": [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
    "Q5_K": [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
    "Q6_K": [1] * 16,
    "IQ4_XS": [0xAA, 0xAA, 0x11, 0x11, 0x11, 0x11],  # less 32
}
ONE, MINIMA = list(np.float16(1).tobytes()), ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "A4", "A8")


def parts(kind: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values, scales and minima of codes, each `[F, K]`, found by ggml's dequantisation of changed bytes."""
    fields, ones = _FIELDS[kind]

    def changed(**new: Any) -> np.ndarray:
        blocks = raw.reshape(-1, block_bytes(kind)).copy()
        for name, value in new.items():
            if name in fields:
                blocks[:, fields[name]] = value
        return dequantised_rows(kind, blocks.reshape(raw.shape))

    codes = changed(d=ONE, least=0, scales=_ONES.get(kind, 0), power=128)  # of halves
    zeros = dict.fromkeys(ones, 0)
    return codes, changed(least=0, **ones), changed(**zeros) if kind in MINIMA else np.zeros_like(codes)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in float32 with one rounding: the float64 sum is made odd where it is not exact."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    even = (total.view(np.int64) & 1) == 0
    away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, away, total).astype(np.float32)


def emulated(kind: str, raw: np.ndarray, x: np.ndarray, *, off: int = 0) -> np.ndarray:
    """The products of rows in eight bits: float32 `[N, F]`. off: added to each code, as a planted fault."""
    codes, scale, minimum = parts(kind, raw)
    groups = x.reshape(len(x), -1, 32)
    largest = np.maximum(np.abs(groups).max(2), np.float32(1e-30)) * np.float32(1 / 127)
    of_rows = (largest.view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    values = np.rint(groups * (np.float32(1) / of_rows)[:, :, None]).astype(np.int64).reshape(x.shape)
    sums = np.zeros((len(x), len(raw)), np.float32)
    run = 16 if kind == "Q6_K" else 32
    for k in range(0, x.shape[1], run):
        own = of_rows[:, k // 32, None]
        exact = values[:, k : k + run] @ (codes[:, k : k + run].astype(np.int64) + off).T
        sums = fused(exact.astype(np.float32) * own, scale[:, k], sums)
        if kind in MINIMA:
            total = values[:, k : k + run].sum(1, keepdims=True).astype(np.float32)
            sums = fused(total * own, minimum[:, k], sums)
    return sums


def rows_in_eight_bits(count: int) -> np.ndarray:
    x = np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)
    x[0, 32:64], x[0, 64:96] = 0, 1e-33
    x[-1] *= np.repeat(np.float32(10) ** np.arange(-8, 8), 32)
    return x


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_products_of_rows_in_eight_bits_are_those_of_numpy(isa: str) -> None:
    products, x = NativeProducts(str(registered(isa, "linear_fours"))), rows_in_eight_bits(29)
    norm = Norm(jnp.linspace(0.5, 2, WIDTH), 1e-5)
    for seed, kind in enumerate(KINDS):
        raw = random_rows((FEATURES, WIDTH), kind, seed)
        weight = coded([(kind, FEATURES)], [raw], "fours")
        plain = dequantised(kind, raw)
        np.testing.assert_array_equal(
            rows_of(products, weight).view(np.uint16), plain.view(np.uint16), err_msg=kind
        )
        expected = emulated(kind, raw, x)
        gated = np.asarray(products.gated(weight, jnp.asarray(x), norm=norm))
        both = np.split(np.asarray(products.linear(weight, jnp.asarray(x), norm=norm)), 2, axis=1)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(gated, both[0] / (1 + np.exp(-both[0])) * both[1], 1e-4, 1e-9)
        for rows in (1, 2, 3, 9, 12, 13, 29):
            some = jnp.asarray(x[:rows])
            for found in (products.linear(weight, some), products.head(weight, None, some).values):
                bits = np.asarray(found).view(np.uint32)
                np.testing.assert_array_equal(
                    bits, expected[:rows].view(np.uint32), err_msg=f"{kind}, {rows} rows"
                )
            np.testing.assert_array_equal(products.gated(weight, some, norm=norm), gated[:rows])


def test_the_largest_sums_are_exact_and_nan_stays_in_its_row() -> None:
    for kind in KINDS:
        for byte in (0, 0x7F, 0x80, 0xFF):
            raw = random_rows((32, WIDTH), kind, 5)
            blocks = raw.reshape(-1, block_bytes(kind))
            for name in ("codes", "high"):
                blocks[:, _FIELDS[kind][0].get(name, slice(0))] = byte
            weight = coded([(kind, 32)], [raw], "fours")
            x = np.where(np.arange(3)[:, None] % 2, -1, np.ones(WIDTH)).astype(np.float32)
            expected = emulated(kind, raw, x)
            x[2, 40] = np.nan
            found = np.asarray(best().linear(weight, jnp.asarray(x)))
            np.testing.assert_array_equal(found[:2].view(np.uint32), expected[:2].view(np.uint32))
            assert np.isnan(found[2]).all()


def test_a_leaf_of_several_kinds_in_fours() -> None:
    kinds, counts = ("Q4_K", "Q8_0", "IQ4_NL"), (48, 16, 25)
    raw = [random_rows((count, WIDTH), kind, count) for kind, count in zip(kinds, counts, strict=True)]
    weight, x = coded(list(zip(kinds, counts, strict=True)), raw, "fours"), rows_in_eight_bits(5)
    expected = np.concatenate([emulated(*each, x) for each in zip(kinds, raw, strict=True)], axis=1)
    found = np.asarray(best().linear(weight, jnp.asarray(x)))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_experts_have_the_bits_of_their_dequantised_form(isa: str) -> None:
    """At once, and in the halves between which several devices gather."""
    products, count = NativeProducts(str(registered(isa, "experts_bf16"))), 3
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((29, WIDTH)), jnp.float32)
    biases = [
        jnp.asarray(generator.standard_normal((count, rows)), jnp.float32) for rows in (2 * WIDTH, WIDTH)
    ]
    routed = Route(
        jnp.asarray(generator.permuted(np.tile(np.arange(4), (29, 1)), axis=1)[:, :2], jnp.int32), x[:, :2]
    )
    for kinds in (("MXFP4", "MXFP4"), ("Q4_K", "Q6_K")):
        raw = [
            random_rows((count * rows, WIDTH), kind, 3)
            for kind, rows in zip(kinds, (2 * WIDTH, WIDTH), strict=True)
        ]
        packed = [coded([(kind, len(rows))], [rows]) for kind, rows in zip(kinds, raw, strict=True)]
        plain = [
            jnp.asarray(dequantised(kind, rows).reshape(count, -1, WIDTH))
            for kind, rows in zip(kinds, raw, strict=True)
        ]
        for gather in (None, lambda hidden: hidden):
            one, other = (
                np.asarray(products.experts(Experts(*both, *biases, 7.0), x, routed, x, gather))
                for both in (packed, plain)
            )
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32), err_msg=str(kinds))


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_experts_multiply_rows_in_eight_bits_as_linear_layers_do(isa: str) -> None:
    """Each row has one expert, whose part of the output it takes whole."""
    products, count = NativeProducts(str(registered(isa, "linear_fours", "experts_fours"))), 3
    generator = np.random.default_rng(0)
    x, given = (jnp.asarray(generator.standard_normal((29, WIDTH)), jnp.float32) for _ in range(2))
    expert = np.arange(29) % count
    raw = [
        random_rows((count * rows, WIDTH), kind, 3) for kind, rows in (("MXFP4", 2 * WIDTH), ("Q6_K", WIDTH))
    ]
    whole = [
        coded([(kind, len(rows))], [rows], "fours") for kind, rows in zip(("MXFP4", "Q6_K"), raw, strict=True)
    ]
    experts = Experts(*whole)
    routed = Route(jnp.asarray(expert[:, None], jnp.int32), jnp.ones((29, 1)))
    hidden: list[np.ndarray] = []

    def gather(of_experts: jax.Array) -> jax.Array:
        hidden.append(np.asarray(of_experts))
        return given

    nothing = jnp.zeros((29, WIDTH))
    out = np.asarray(products.experts(experts, x, routed, nothing, gather))
    for each in range(count):
        gate_up, down = (
            coded([(kind, len(rows) // count)], [np.split(rows, count)[each]], "fours")
            for kind, rows in zip(("MXFP4", "Q6_K"), raw, strict=True)
        )
        mine = expert == each
        np.testing.assert_array_equal(out[mine], products.linear(down, given[mine]))
        gate, up = np.split(np.asarray(products.linear(gate_up, x[mine])), 2, axis=1)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(hidden[0][mine], gate / (1 + np.exp(-gate)) * up, 1e-4, 1e-9)
    at_once = products.experts(experts, x, routed, nothing)
    in_halves = products.experts(experts, x, routed, nothing, lambda of_experts: of_experts)
    np.testing.assert_array_equal(at_once, in_halves)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_rows_in_eight_bits_show(kind: str) -> None:
    """The planted faults: codes in another order, scales of the next group, a zero point off by one."""
    raw, x = random_rows((32, WIDTH), kind, 7), rows_in_eight_bits(3)[1:2]
    expected = emulated(kind, raw, x).view(np.uint32)

    def differing(weight: Coded) -> float:
        found = np.asarray(best().linear(weight, jnp.asarray(x)))
        return float((found.view(np.uint32) != expected).mean())

    assert differing(coded([(kind, 32)], [raw], "fours")) == 0
    right = packing._fours

    def wrong(codes: np.ndarray, kind: str) -> np.ndarray:
        return right(np.roll(codes, 4, axis=2), kind)

    with mock.patch.object(packing, "_fours", wrong):
        assert differing(coded([(kind, 32)], [raw], "fours")) > 0.5
    weight = coded([(kind, 32)], [raw], "fours")
    own, values = KINDS[kind], np.array(weight.values)
    groups = WIDTH // own.group
    blocks = values[64:].reshape(2, -1)
    scales = blocks[:, groups * own.codes :][:, : groups * own.scales]
    scales[...] = np.roll(scales.reshape(2, groups, -1), 1, axis=1).reshape(scales.shape)
    assert differing(Coded(jnp.asarray(values), weight.form)) > 0.5
    assert (emulated(kind, raw, x, off=1).view(np.uint32) != expected).mean() > 0.5
