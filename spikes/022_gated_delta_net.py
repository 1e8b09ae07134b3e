# Frozen: runs at commit 84bfb74.
"""What does the recurrence of a gated DeltaNet layer cost beside its two products, at decode and at prefill?

python -m spikes.022_gated_delta_net
"""

# %%
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.graphs.config import DeltaForm
from xla_engine.graphs.delta_net import rule as delta_rule
from xla_engine.graphs.delta_net.layer import DeltaWeights, delta_decode, delta_prefill, make_state
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, Products
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.runner.native_library.build import register

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=7)
arguments.add_argument("--rows", type=int, nargs="+", default=[8, 32])
arguments.add_argument("--segment", type=int, nargs="+", default=[16, 32, 64])
arguments.add_argument("--lanes", type=int, default=4)
arguments.add_argument("--width", type=int, default=64)
options = arguments.parse_known_args()[0]

ISA = register()
HIDDEN = 2048  # Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B
FORM = DeltaForm(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6)


def draw(seed: int, *size: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), size, dtype)


weights = DeltaWeights(
    draw(0, FORM.mixed_features, FORM.kernel),
    draw(1, FORM.value_heads) - 3,
    draw(2, FORM.value_heads),
    jnp.ones(FORM.value_dim),
)
into = draw(3, FORM.projected_features, HIDDEN, dtype=jnp.bfloat16) * 0.02
back = draw(4, HIDDEN, FORM.inner_features, dtype=jnp.bfloat16) * 0.02


def products(form: Products, into: jax.Array, back: jax.Array, x: jax.Array) -> jax.Array:
    projected = form.linear(into, x)
    return form.linear(back, projected[:, : FORM.inner_features], residual=x)


class Step:
    """A donated state, stepped again and again."""

    def __init__(self, rows: int, function: Callable[..., Any], *operands: Any, **named: Any) -> None:
        self.state = make_state(FORM, rows)
        self.rest = (operands, named)
        jitted = jax.jit(function, donate_argnums=1)
        self.run = jitted.lower(weights, self.state, *operands, **named).compile()

    def __call__(self) -> None:
        operands, named = self.rest
        self.state, out = self.run(weights, self.state, *operands, **named)
        out.block_until_ready()


def finish(run: Callable[..., jax.Array], *operands: Any) -> None:
    run(*operands).block_until_ready()


# %%
variants: dict[tuple[str, str], Any] = {}
for rows in options.rows:
    where = f"decode, {rows} rows"
    x, projected = draw(5, rows, HIDDEN), draw(6, rows, FORM.projected_features)
    for name, native in (("pure JAX", None), ("C++", ISA)):
        variants[where, f"recurrence, {name}"] = Step(
            rows, functools.partial(delta_decode, FORM, native=native), projected, live=jnp.ones(rows, bool)
        )
    for name, form in (("pure JAX", WEIGHT_LEFT), ("C++", NativeProducts(ISA))):
        if form is not None:
            run = jax.jit(functools.partial(products, form)).lower(into, back, x).compile()
            variants[where, f"products, {name}"] = functools.partial(finish, run, into, back, x)
tokens = options.lanes * options.width
where = f"prefill, {options.lanes} x {options.width} tokens"
x, projected = draw(5, tokens, HIDDEN), draw(6, tokens, FORM.projected_features)
slot = jnp.arange(options.lanes, dtype=jnp.int32)
for segment in (*options.segment, 0):
    with mock.patch.object(delta_rule, "SEGMENT", segment):
        name = f"pure JAX, segments of {segment}" if segment else "C++"
        variants[where, f"recurrence, {name}"] = Step(
            options.lanes,
            functools.partial(delta_prefill, FORM, native=None if segment else ISA),
            projected,
            lanes=Extents(slot, jnp.zeros_like(slot), jnp.full_like(slot, options.width)),
        )
for name, form in (("pure JAX", ROWS_LEFT), ("C++", NativeProducts(ISA))):
    if form is not None:
        run = jax.jit(functools.partial(products, form)).lower(into, back, x).compile()
        variants[where, f"products, {name}"] = functools.partial(finish, run, into, back, x)
times = interleave(variants, options.rounds)
print(describe_machine(), "\n")
table = [[where, what, each.milliseconds()] for (where, what), each in times.items()]
print(markdown_table(["call", "part", "ms"], table))
