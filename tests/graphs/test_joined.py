"""Calls of C++ kernels that run as one call of XLA's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.instruction_sets import NATIVE_ISAS, registered
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.joined import JOINED, joined, laid_out, number
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm

WIDTH = 64


def layers(products: NativeProducts, weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    """Two gated layers whose residual stream is overwritten in place, and what other operations make of the first."""
    norm = Norm(jnp.full(WIDTH, 0.5, jnp.float32), 1e-5)
    seen = []
    for up, down in (weights[:2], weights[2:]):
        x = products.linear(down, products.gated(up, x, norm=norm), residual=x)
        seen.append(x)
    return x, seen[0].sum(axis=1), products.head(weights[1], norm, x).values * 2


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("rows", [1, 5])
def test_joined_calls_have_the_bits_of_separate_ones(isa: str, rows: int) -> None:
    """Even if another operation reads a value that a later call would overwrite."""
    products = NativeProducts(registered(isa, "sampler", "linear_bf16") or "")
    draw = np.random.default_rng(rows)
    shapes = [(2 * WIDTH, WIDTH), (WIDTH, WIDTH)] * 2
    weights = [
        jnp.asarray(products.pack(draw.standard_normal(shape, np.float32).astype(jnp.bfloat16) / 8))
        for shape in shapes
    ]
    x = jnp.asarray(draw.standard_normal((rows, WIDTH), np.float32))

    def run(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
        return layers(products, weights, x)

    inventory = Inventory()
    inventory.compile(
        [
            Program(name=name, function=run, arguments=(weights, x), isa=joins)
            for name, joins in (("apart", None), ("joined", isa))
        ]
    )
    assert JOINED in inventory.text("joined") and JOINED not in inventory.text("apart")
    for _ in range(20):  # helpers come and go
        for found, expected in zip(
            inventory("joined", weights, x), inventory("apart", weights, x), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", NATIVE_ISAS[:1])
def test_errors_of_joined_calls_are_those_of_the_kernel_that_failed(isa: str) -> None:
    registered(isa, "sampler", "linear_bf16")

    def run(target: str, values: jax.Array) -> Any:
        call = jax.ffi.ffi_call(f"xla_engine_{target}_{isa}", jax.ShapeDtypeStruct((4, 4), jnp.float32))
        return call(call(values))

    values = jnp.ones((4, 4), jnp.float32)
    for target, complaint in (("linear_bf16", "an argument is missing"), ("unheard_of", "load its library")):
        traced = jax.make_jaxpr(lambda values, target=target: run(target, values))(values)
        with pytest.raises(Exception, match=complaint):
            jax.block_until_ready(jax.jit(joined(traced.jaxpr, traced.consts, isa))(values))


@given(
    values=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=25
    )
)
def test_values_in_use_at_the_same_time_do_not_overlap(values: list[tuple[int, int, int]]) -> None:
    spans = sorted(
        ((first, first + longer, size) for first, longer, size in values), key=lambda span: span[0]
    )
    shapes = [SimpleNamespace(size=size, dtype=np.dtype(np.float32)) for *_, size in spans]
    offsets, size = laid_out([(*span[:2], shape) for span, shape in zip(spans, shapes, strict=True)])
    places = [(offset, offset + 4 * span[2]) for offset, span in zip(offsets, spans, strict=True)]
    assert all(offset % 64 == 0 for offset in offsets) and size == max(end for _, end in places)
    for at, (first, last, _) in enumerate(spans):
        for other in range(at):
            if spans[other][0] <= last and first <= spans[other][1]:
                assert places[at][0] >= places[other][1] or places[other][0] >= places[at][1]


def test_numbers_of_targets_fit_an_attribute_and_differ() -> None:
    found = [number(f"xla_engine_linear_{kind}") for kind in ("bf16_avx2", "bf16_avx512", "int8_avx2")]
    assert len(set(found)) == 3 and all(-(2**63) <= each < 2**63 for each in found)
