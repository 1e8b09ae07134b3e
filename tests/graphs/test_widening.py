"""Products in bf16 have the same bits by vdpbf16ps and widened, and a timing chooses between them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graphs.test_coded import coded, dequantised
from tests.support.coded_blocks import random_rows
from tests.support.instruction_sets import NAMES, registered
from xla_engine.errors import ConfigError
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm, Weight
from xla_engine.runner.native_library import widening
from xla_engine.runner.native_library.widening import ALL_ROWS, faster_widened

ROWS, WIDTH, FEATURES = 64, 512, 64
KINDS = ("Q4_K", "Q6_K", "Q8_0")


@functools.cache
def products() -> NativeProducts:
    if widening.ISA not in NAMES:
        pytest.skip(f"needs a processor with {widening.ISA}")
    return NativeProducts(str(registered(widening.ISA, "linear_bf16", "linear_coded")))


def products_of(
    form: NativeProducts, weights: Sequence[tuple[Weight, Weight]], x: jax.Array, live: jax.Array
) -> list[jax.Array]:
    """weights: each as layers and as the head take it."""
    form = form.for_rows(live)
    norm = Norm(jnp.linspace(0.5, 2, WIDTH), 1e-5)
    found: list[Any] = []
    for weight, head in weights:
        found += [form.linear(weight, x), form.gated(weight, x, norm=norm), form.head(head, norm, x).values]
    return found


def test_both_have_the_same_bits_for_every_number_of_rows() -> None:
    """For packed weights in bf16 and in quantised blocks, whichever sizes of groups widen."""
    form = products()
    raw = {kind: random_rows((FEATURES, WIDTH), kind, seed) for seed, kind in enumerate(KINDS)}
    plain = dequantised("Q4_K", raw["Q4_K"])
    weights: list[tuple[Weight, Weight]] = [
        (jnp.asarray(form.pack(plain)), jnp.asarray(form.pack(plain, "head")))
    ]
    weights += [
        (weight, weight) for weight in (coded([(kind, FEATURES)], [rows]) for kind, rows in raw.items())
    ]
    program = jax.jit(functools.partial(products_of, form, weights))
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((ROWS, WIDTH)), jnp.float32)

    def run(widened: Sequence[int], live: np.ndarray) -> list[np.ndarray]:
        before = {kind: widening.widen(kind, widened) for kind in ("bf16", "coded")}
        try:
            return [np.asarray(each) for each in program(x, live)]
        finally:
            for kind, rows in before.items():
                widening.widen(kind, rows)

    for count in range(1, ROWS + 1):
        live = np.zeros(ROWS, bool)
        live[draw.choice(ROWS, count, replace=False)] = True
        expected = run((), live)
        assert all(each[live].any() for each in expected)
        for widened in (ALL_ROWS, (1, 3, 5, 7, 9, 11), (6, 10, 12)):
            for found, bits in zip(run(widened, live), expected, strict=True):
                assert found.tobytes() == bits.tobytes(), (count, widened)


def test_products_widen_where_the_instruction_is_slower() -> None:
    assert faster_widened([(1.0, 2.0)] * 12) == ()  # twice the rate by vdpbf16ps
    assert faster_widened([(2.0, 1.0)] * 12) == tuple(ALL_ROWS)
    slow_from_six = [(1.0, 1.0)] * 5 + [(1.5, 1.0)] * 7
    assert faster_widened(slow_from_six) == (6, 7, 8, 9, 10, 11, 12)
    assert faster_widened([(1.05, 1.0)] * 12) == ()  # not for what may be noise


class Library:
    """Stands for a library in which vdpbf16ps takes `slower` times as long; counts its timings."""

    def __init__(self, slower: float) -> None:
        self.timed, self.widened = 0, list[int]()

        def time(seconds: ctypes.Array[ctypes.c_double]) -> None:
            self.timed += 1
            seconds[:] = list(itertools.chain(*[(slower, 1.0)] * len(ALL_ROWS)))

        self.XlaEngineTimeLinearBf16, self.XlaEngineWidenLinearBf16 = time, self.widened.append


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts a process that loads a library."""
    monkeypatch.delenv("XLA_ENGINE_BF16_PRODUCTS", raising=False)
    monkeypatch.setenv("XLA_ENGINE_CACHE", str(tmp_path / "cache"))

    def load(library: Library, digest: str = "a") -> dict[str, str]:
        monkeypatch.setattr(widening, "_widened", {})
        monkeypatch.setattr(widening, "_libraries", {})
        widening.choose({"linear_bf16": library}, digest)  # type: ignore[dict-item]
        return widening.words()

    return load


def test_the_first_start_times_and_later_ones_read_what_it_found(start: Any, tmp_path: Path) -> None:
    first, second, other = Library(2), Library(0.5), Library(0.5)
    assert start(first) == start(second) == {"bf16": "widened"}
    assert (first.timed, second.timed) == (1, 0) and second.widened == [0b1111111111110]
    assert start(other, "b") == {"bf16": "vdpbf16ps"} and other.timed == 1 and other.widened == [0]
    kept = sorted((tmp_path / "cache" / "native").glob("widening-*.json"))
    assert len(kept) == 2 and all(len(json.loads(each.read_text())["seconds"]) == 12 for each in kept)
    for each in kept:
        each.write_text("damaged")
    assert start(second) == {"bf16": "vdpbf16ps"} and second.timed == 1


def test_the_environment_decides_instead(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(1)
    for asked, words, bits in (("widened", "widened", 0b1111111111110), ("pairs", "vdpbf16ps", 0)):
        monkeypatch.setenv("XLA_ENGINE_BF16_PRODUCTS", asked)
        assert start(library) == {"bf16": words} and library.widened[-1] == bits and not library.timed
    monkeypatch.setenv("XLA_ENGINE_BF16_PRODUCTS", "fast")
    with pytest.raises(ConfigError, match="XLA_ENGINE_BF16_PRODUCTS must be one of auto, pairs, widened"):
        start(library)
