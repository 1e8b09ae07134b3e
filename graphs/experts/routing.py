"""Routed experts (Shazeer et al. 2017): which experts a row takes, and the sum of what they make of it.

Everything is row-wise. Which rows share an expert decides where a row stands in a product, never its bits: rows are
brought together in blocks of one fixed size, and each row adds up its experts in its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.int8 import Quantized, grouped_product
from xla_engine.graphs.ops.norms import flatly
from xla_engine.graphs.ops.top_k import largest_by_rank

BLOCK_ROWS = 16  # rows of one expert that are multiplied together (findings/experts_and_recurrent_layers.md)
_CLAMPED_SLOPE = 1.702  # of the sigmoid in gpt-oss's gate


Gather = Callable[[jax.Array], jax.Array]  # `[A, F of a device, ...]` to `[A, F of all, ...]`


class Experts(NamedTuple):
    """Weights of one layer's experts.

    gate_up: `[E, 2 F, D]`, gates first.   down: `[E, D, F]`.
    gate_up_bias: f32 `[E, 2 F]`, down_bias: f32 `[E, D]`, or None.
    limit: of the clamped gate, see `gate`.
    """

    gate_up: jax.Array | Quantized
    down: jax.Array | Quantized
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    limit: float | None = None

    @property
    def number(self) -> int:
        return len(self.down.values if isinstance(self.down, Quantized) else self.down)

    @property
    def row_dtype(self) -> jnp.dtype:
        """Of the rows that either product takes: products in int8 round by themselves."""
        return jnp.dtype(jnp.float32) if isinstance(self.down, Quantized) else self.down.dtype


class Route(NamedTuple):
    """expert: i32 `[N, K]`, E where the row takes none.   weight: f32 `[N, K]`, of what each expert returns."""

    expert: jax.Array
    weight: jax.Array


def route(logits: jax.Array, count: int, *, renormalise: bool, live: jax.Array | None = None) -> Route:
    """The `count` experts of largest `logits [N, E]` per row, the lower index first among equals.

    Weights are softmax probabilities over all experts, or over the chosen ones where `renormalise`. Rows that are not
    `live [N]` take no expert: what they compute is not read, and neither are the weights of their experts.
    """
    experts = logits.shape[1]
    chosen, expert = lax.platform_dependent(
        logits,
        cpu=lambda logits: tuple(lax.top_k(logits, count)),
        default=lambda logits: tuple(found.T for found in largest_by_rank(logits.T, count)),
    )
    weight = flatly(jnp.exp, chosen - chosen[:, :1])
    over = weight if renormalise else flatly(jnp.exp, logits - chosen[:, :1])
    weight = weight / sum_last(over)
    if live is not None:
        expert = jnp.where(live[:, None], expert, experts)
    return Route(expert.astype(jnp.int32), weight)


def gate(gates: jax.Array, ups: jax.Array, limit: float | None) -> jax.Array:
    """SwiGLU (Shazeer 2020), `silu(gate) up`; with a `limit` the clamped form of gpt-oss.

    That is `(up + 1) gate sigmoid(1.702 gate)`, gates cut off above `limit` and ups on both sides.
    """
    if limit is None:
        return jax.nn.silu(gates) * ups
    gates, ups = jnp.minimum(gates, limit), jnp.clip(ups, -limit, limit)
    return (ups + 1) * (gates * jax.nn.sigmoid(_CLAMPED_SLOPE * gates))


def blocked_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
) -> jax.Array:
    """`residual [N, D]` plus the weighted sum of each row's experts of `x [N, D]`, float32, in pure JAX.

    One block of rows of one expert at a time, so that an expert's weights are read once per block and those of
    experts that no row takes not at all. With `gather` all blocks' first products come before their second.
    """
    gate_up, down, gate_up_bias, down_bias, limit = experts
    (count, features), per_row = residual.shape, routed.expert.shape[1]
    blocks = _blocks(routed.expert.reshape(-1), experts.number)
    rows = x.astype(experts.row_dtype)

    def gated(expert: jax.Array, place: jax.Array) -> jax.Array:
        block = rows[jnp.minimum(place // per_row, count - 1)]  # [R, D]
        both = _product(gate_up, expert, block, 1)  # [2 F, R]
        if gate_up_bias is not None:
            both = both + gate_up_bias[expert][:, None]
        gates, ups = lax.optimization_barrier(both).reshape(2, -1)
        return lax.optimization_barrier(gate(gates, ups, limit).astype(experts.row_dtype)).reshape(
            -1, BLOCK_ROWS
        )

    def put(out: jax.Array, place: jax.Array, hidden: jax.Array, expert: jax.Array) -> jax.Array:
        result = _product(down, expert, hidden, 0)  # [D, R]
        if down_bias is not None:
            result = result + down_bias[expert][:, None]
        result = lax.optimization_barrier(result)  # else XLA turns the product around (findings/products.md)
        return out.at[place].set(result.T, mode="drop", unique_indices=True)

    def multiply(index: jax.Array, out: jax.Array) -> jax.Array:
        expert, place = blocks.expert[index], blocks.assignment[index]
        return put(out, place, gated(expert, place), expert)

    out = jnp.zeros((count * per_row, features), jnp.float32)
    if gather is None:
        out = lax.fori_loop(0, blocks.used, multiply, out)
    else:
        most = len(blocks.expert)
        inner = (gate_up.values if isinstance(gate_up, Quantized) else gate_up).shape[1] // 2

        def gate_block(index: jax.Array, hidden: jax.Array) -> jax.Array:
            return hidden.at[index].set(gated(blocks.expert[index], blocks.assignment[index]))

        hidden = jnp.zeros((most, inner, BLOCK_ROWS), experts.row_dtype)
        # Features stay in front: XLA:CPU multiplies what was transposed by another product (findings/many_devices.md).
        hidden = gather(lax.fori_loop(0, blocks.used, gate_block, hidden))

        def put_block(index: jax.Array, out: jax.Array) -> jax.Array:
            block = lax.optimization_barrier(hidden[index])
            return put(out, blocks.assignment[index], block, blocks.expert[index])

        out = lax.fori_loop(0, blocks.used, put_block, out)
    out = out.reshape(count, per_row, features)
    return summed(routed, out, residual)


def summed(routed: Route, out: jax.Array, residual: jax.Array) -> jax.Array:
    """`residual [N, D]` plus what each row's experts made of it, `out [N, K, D]`, one after the other."""
    total = residual
    for index in range(out.shape[1]):
        total = total + routed.weight[:, index, None] * out[:, index]
    return total


class _Blocks(NamedTuple):
    """expert: i32 `[M]`.   assignment: i32 `[M, R]`, places in the flat list of assignments; empty places are
    distinct and behind its end.   used: i32, blocks that hold any."""

    expert: jax.Array
    assignment: jax.Array
    used: jax.Array


def _blocks(expert: jax.Array, experts: int) -> _Blocks:
    """Assignments `expert [A]` brought together by expert, `BLOCK_ROWS` at a time; `experts` stands for none."""
    total = expert.shape[0]
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    members = jnp.zeros(experts, jnp.int32).at[expert].add(1, mode="drop")
    blocks = (members + BLOCK_ROWS - 1) // BLOCK_ROWS
    last = jnp.cumsum(blocks)
    used = min(experts, total)
    index = jnp.arange(used + (total - used) // BLOCK_ROWS, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(last, index, side="right"), experts - 1).astype(jnp.int32)
    offset = (index - (last - blocks)[owner])[:, None] * BLOCK_ROWS + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)
    place = (jnp.cumsum(members) - members)[owner][:, None] + offset
    outside = total + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)
    assignment = jnp.where(offset < members[owner][:, None], order[jnp.minimum(place, total - 1)], outside)
    return _Blocks(owner, assignment, last[-1])


def _product(weights: jax.Array | Quantized, expert: jax.Array, rows: jax.Array, axis: int) -> jax.Array:
    """`weights[expert] [M, K]` times rows, contracted over their `axis`: float32 `[M, R]`."""
    if isinstance(weights, Quantized):
        of_expert = Quantized(*(part[expert] for part in weights))
        return grouped_product(of_expert, rows, axis, weight_left=True)
    weight = weights[expert]
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(
        weight, rows, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
