# Frozen: runs at commit 055c598.
"""Which form of routed experts is fast at decode, without letting a row's bits depend on who shares its experts?

python -m spikes.020_routed_experts
"""

# %%
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.graphs.experts import routing as moe
from xla_engine.graphs.experts.native import native_experts
from xla_engine.graphs.experts.routing import Experts, Route, blocked_experts, gate, route
from xla_engine.runner.native_library.build import register

Form = Callable[[Experts, jax.Array, Route, jax.Array], jax.Array]


@dataclass(frozen=True)
class Shape:
    """One layer's experts: hidden size, width of an expert, experts, experts per row."""

    hidden: int
    inner: int
    experts: int
    chosen: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "a small one": Shape(1024, 512, 16, 4),  # for the forms that take seconds
}


arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--rows", type=int, nargs="+", default=[8, 32, 256])
arguments.add_argument("--block", type=int, nargs="+", default=[8, 16, 32])
arguments.add_argument("--model", nargs="+", default=list(SHAPES))
options = arguments.parse_known_args()[0]


# %% Forms that are not in the package
def ragged(experts: Experts, x: jax.Array, routed: Route, residual: jax.Array) -> jax.Array:
    """Assignments sorted by expert, `lax.ragged_dot` over the groups."""
    count, per_row = routed.expert.shape
    flat = routed.expert.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts.gate_up.shape[0]).astype(jnp.int32)
    rows = x.astype(experts.gate_up.dtype)[order // per_row]
    both = lax.ragged_dot(
        rows, experts.gate_up.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32
    )  # [A, 2 F]
    hidden = gate(*jnp.split(both, 2, axis=1), None).astype(rows.dtype)
    out = lax.ragged_dot(hidden, experts.down.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    weighted = out[jnp.argsort(order)].reshape(count, per_row, -1) * routed.weight[..., None]
    return residual + jnp.sum(weighted, axis=1)


def per_assignment(experts: Experts, x: jax.Array, routed: Route, residual: jax.Array) -> jax.Array:
    """Each assignment by itself: its expert's weights are gathered, rows of one expert share nothing."""
    count, per_row = routed.expert.shape
    rows = x.astype(experts.gate_up.dtype)

    def multiply(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = routed.expert[index // per_row, index % per_row]
        both = jnp.dot(experts.gate_up[expert], rows[index // per_row], preferred_element_type=jnp.float32)
        hidden = gate(*jnp.split(both, 2), None).astype(rows.dtype)
        return out.at[index].set(jnp.dot(experts.down[expert], hidden, preferred_element_type=jnp.float32))

    out = jnp.zeros((count * per_row, x.shape[1]), jnp.float32)
    out = lax.fori_loop(0, count * per_row, multiply, out).reshape(count, per_row, -1)
    return residual + jnp.sum(out * routed.weight[..., None], axis=1)


def blocked(size: int) -> Form:
    def form(experts: Experts, x: jax.Array, routed: Route, residual: jax.Array) -> jax.Array:
        with mock.patch.object(moe, "BLOCK_ROWS", size):
            return blocked_experts(experts, x, routed, residual)

    return form


def alike(key: jax.Array, experts: int, *size: int) -> jax.Array:
    """One random matrix for all experts: drawing gigabytes takes longer than the measurement."""
    return jnp.tile(jax.random.normal(key, size, jnp.bfloat16) * 0.03, (experts, 1, 1))


def finish(run: Callable[..., jax.Array], *operands: Any) -> None:
    run(*operands).block_until_ready()


# %%
def forms(shape: Shape, rows: int) -> dict[str, Form]:
    found: dict[str, Form] = {f"blocks of {size}": blocked(size) for size in options.block}
    if shape == SHAPES["a small one"]:
        found |= {"ragged_dot": ragged, "per assignment": per_assignment}
    found["C++"] = functools.partial(native_experts, isa=register())
    return found


print(describe_machine(), "\n")
table = []
for model in options.model:
    shape = SHAPES[model]
    keys = jax.random.split(jax.random.key(0), 3)
    experts = Experts(
        alike(keys[0], shape.experts, 2 * shape.inner, shape.hidden),
        alike(keys[1], shape.experts, shape.hidden, shape.inner),
    )
    for rows in options.rows:
        x = jax.random.normal(keys[2], (rows, shape.hidden), jnp.float32)
        routed = route(jax.random.normal(keys[1], (rows, shape.experts)), shape.chosen, renormalise=True)
        used = len(np.unique(np.asarray(routed.expert)))
        needed = used * 6 * shape.inner * shape.hidden
        variants, expected = {}, None
        for name, form in forms(shape, rows).items():
            compiled = jax.jit(form).lower(experts, x, routed, x).compile()
            found = np.asarray(compiled(experts, x, routed, x))
            expected = found if expected is None else expected
            assert np.abs(found - expected).max() < 0.05 * np.abs(expected - x).max(), name
            variants[name] = functools.partial(finish, compiled, experts, x, routed, x)
        times = interleave(variants, options.rounds)
        base = times[f"blocks of {moe.BLOCK_ROWS}"].median
        for name, each in times.items():
            table.append(
                [
                    model,
                    str(rows),
                    str(used),
                    name,
                    each.milliseconds(),
                    f"{needed / each.median / 1e9:.1f}",
                    f"{base / each.median:.2f}",
                ]
            )
    del experts, variants
print(
    markdown_table(
        ["layer", "rows", "experts used", "form", "ms", "GB/s of weights", "against blocks of 16"], table
    )
)
