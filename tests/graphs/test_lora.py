"""What adapters add to products: it agrees with NumPy, and is the same bits beside any other rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import HERE
from tests.support.models import TINY
from xla_engine.errors import ConfigError
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, FeatureMajor, Norm, Products
from xla_engine.graphs.lora.form import LoraForm, Matrices
from xla_engine.graphs.ops.int8 import Quantized, quantize_weight
from xla_engine.runner.backends import choose_products

WIDTH, ENDS, SLOTS, RANK = 320, (192, 240, 320), 3, 12
BF16 = jnp.dtype(jnp.bfloat16)
PARTS = ("linear_bf16", "lora_bf16")
FORMS = [*HERE, "decode", "prefill"]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    if request.param in ("decode", "prefill"):
        return WEIGHT_LEFT if request.param == "decode" else ROWS_LEFT
    try:
        return choose_products("native", TINY, BF16, request.param, parts=PARTS)
    except ConfigError as error:
        pytest.skip(str(error))


class Drawn:
    """One product of each kind, what adapters have for it, and rows."""

    def __init__(self, form: Products, dtype: Any = BF16) -> None:
        draw = np.random.default_rng(3)
        self.is_native = form not in (WEIGHT_LEFT, ROWS_LEFT)

        def values(*shape: int, scale: float = 0.1) -> np.ndarray:
            return np.asarray(draw.standard_normal(shape, np.float32) * scale)

        def weight(*shape: int) -> Any:
            if dtype == jnp.int8:
                kept, scale = quantize_weight(values(*shape))
                return Quantized(jnp.asarray(form.pack(kept)), jnp.asarray(form.pack(scale, "scale")))
            return jnp.asarray(form.pack(values(*shape).astype(BF16)))

        def matrices(ends: tuple[int, ...], width: int) -> tuple[Matrices, np.ndarray, np.ndarray]:
            down = values(SLOTS, len(ends), RANK, width).astype(BF16)
            up = values(SLOTS, RANK, ends[-1], scale=0.3).astype(BF16)
            room = LoraForm(SLOTS, RANK, BF16, packed=self.is_native)
            held = jnp.asarray(np.stack([room.stored(each) for each in up]))
            ranks = np.full((SLOTS, len(ends)), RANK, np.int32)
            ranks[1], ranks[0, -1] = 7, 0
            for slot, part in np.ndindex(ranks.shape):
                down[slot, part, ranks[slot, part] :] = 0
            return Matrices(jnp.asarray(down), held, jnp.asarray(ranks), ends), down, up

        self.linear, self.gates, self.down = weight(320, WIDTH), weight(640, WIDTH), weight(WIDTH, 320)
        self.of_linear, self.of_gates = matrices(ENDS, WIDTH), matrices((320, 640), WIDTH)
        self.of_down = matrices((WIDTH,), 320)
        self.norm = Norm(jnp.asarray(1 + values(WIDTH)), 1e-5)
        self.x = values(64, WIDTH, scale=1.0)
        self.adapter = draw.integers(0, SLOTS + 1, 64).astype(np.int32)
        self.live = draw.random(64) < 0.8

    def run(self, form: Products, rows: np.ndarray, adapter: np.ndarray | None) -> list[np.ndarray]:
        """Compute each product of these rows; each row is a lane."""

        def call(x: jax.Array, live: jax.Array, adapter: jax.Array | None) -> list[jax.Array]:
            products = form.for_rows(live).with_adapters(adapter)
            linear = products.of_weight(self.of_linear[0]).linear(self.linear, x, norm=self.norm, residual=x)
            hidden = products.of_weight(self.of_gates[0]).gated(self.gates, x, norm=self.norm)
            gelu = products.of_weight(self.of_gates[0]).gated(self.gates, x, activation="gelu_tanh")
            down = products.of_weight(self.of_down[0]).linear(self.down, hidden, residual=x)
            flat = [each.values.T if isinstance(each, FeatureMajor) else each for each in (hidden, gelu)]
            return [linear, *(each.astype(jnp.float32) for each in flat), down]

        given = None if adapter is None else jnp.asarray(adapter[rows])
        found = jax.jit(call)(jnp.asarray(self.x[rows]), jnp.asarray(self.live[rows]), given)
        return [np.asarray(each) for each in found]

    def expected_linear(self, row: int) -> np.ndarray:
        """What the adapter adds to the first product of a row, by PEFT's formula."""
        if not self.adapter[row]:
            return np.zeros(ENDS[-1])
        x = self.x[row].astype(np.float64)
        x = x / np.sqrt((x**2).mean() + 1e-5) * np.asarray(self.norm.weight)
        _, down, up = self.of_linear
        down, up = (each[self.adapter[row] - 1].astype(np.float64) for each in (down, up))
        begins = (0, *ENDS[:-1])
        return np.concatenate(
            [(down[p] @ x) @ up[:, b:e] for p, (b, e) in enumerate(zip(begins, ENDS, strict=True))]
        )


def test_rows_with_an_adapter_get_what_peft_adds_and_others_keep_their_bits(form: Products) -> None:
    drawn = Drawn(form)
    every = np.arange(64)
    with_them, without = drawn.run(form, every, drawn.adapter), drawn.run(form, every, None)
    for row in np.flatnonzero(drawn.live):
        added = with_them[0][row].astype(np.float64) - without[0][row]
        np.testing.assert_allclose(added, drawn.expected_linear(row), atol=2e-4)
        for one, other in zip(with_them, without, strict=True):
            assert (one[row].tobytes() == other[row].tobytes()) == (drawn.adapter[row] == 0)


def test_a_row_has_its_bits_at_any_place_among_any_rows(form: Products) -> None:
    """With 1, 4, 8, 12 and 32 rows, in any order. XLA's products promise it for a fixed number of rows only."""
    drawn = Drawn(form)
    every = drawn.run(form, np.arange(64), drawn.adapter)
    draw = np.random.default_rng(0)
    for count in (1, 4, 8, 12, 32) if drawn.is_native else (64, 64):
        rows = draw.choice(64, count, replace=False)
        for one, other in zip(every, drawn.run(form, rows, drawn.adapter), strict=True):
            for place, row in enumerate(rows):
                assert one[row].tobytes() == other[place].tobytes(), f"row {row} among {count}"


def test_instruction_sets_give_the_same_bits() -> None:
    """This holds without matrix tiles, which sum pairs in one operation."""
    names = [name for name in ("avx512_bf16", "avx512", "avx2") if name in FORMS]
    found = []
    for name in names:
        form = choose_products("native", TINY, BF16, name, parts=PARTS)
        assert form is not None
        drawn = Drawn(form)
        results = drawn.run(form, np.arange(64), drawn.adapter)
        found.append([each[drawn.live].tobytes() for each in results])
    assert all(each == found[0] for each in found)


@pytest.mark.full
def test_int8_weights_take_adapters_too() -> None:
    form = choose_products("auto", TINY, jnp.dtype(jnp.int8), parts=("linear_int8", "lora_int8"))
    if form is None:
        form = ROWS_LEFT
    drawn = Drawn(form, jnp.dtype(jnp.int8))
    every = np.arange(64)
    with_them, without = drawn.run(form, every, drawn.adapter), drawn.run(form, every, None)
    for row in np.flatnonzero(drawn.live):
        added = with_them[0][row].astype(np.float64) - without[0][row]
        np.testing.assert_allclose(added, drawn.expected_linear(row), atol=2e-4)
        if not drawn.adapter[row]:
            assert all(a[row].tobytes() == b[row].tobytes() for a, b in zip(with_them, without, strict=True))


def test_a_bias_comes_on_top_of_what_adapters_add(form: Products) -> None:
    """A bias is added once, to linear products and to gates and ups. (Qwen2 has biases of queries and keys.)"""
    drawn = Drawn(form)
    bias = jnp.asarray(np.random.default_rng(5).standard_normal(ENDS[-1], np.float32))

    def call(x: jax.Array, adapter: jax.Array) -> tuple[jax.Array, jax.Array]:
        products = form.with_adapters(adapter).of_weight(drawn.of_linear[0])
        return products.linear(drawn.linear, x, bias=bias), products.linear(drawn.linear, x)

    found, plain = jax.jit(call)(jnp.asarray(drawn.x), jnp.asarray(drawn.adapter))
    np.testing.assert_allclose(np.asarray(found), np.asarray(plain) + np.asarray(bias), atol=1e-5)
