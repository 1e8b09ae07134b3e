"""Routed experts on CUDA, in Pallas for Triton: one program for each block of rows of an expert and tile of features.

It computes `graphs.experts.routing.blocked_experts` without its loop over blocks, in which the host would wait for the
device before each iteration (findings/gpu.md). Empty blocks end at once, so that unused experts are not read. Law 1:
the place of a row in a block changes none of its bits, and features are summed in tiles of fixed size and order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_engine.graphs.experts.routing import BLOCK_ROWS, Experts, Gather, Route, gate, summed
from xla_engine.graphs.ops.coded import Coded
from xla_engine.graphs.ops.gpu_call import Ref, dot, kernel_call, load, store
from xla_engine.graphs.ops.int8 import Quantized

_TILE = 64  # output features of a program, and input features that it sums at once


def gpu_experts(
    experts: Experts,
    x: jax.Array,
    routed: Route,
    residual: jax.Array,
    gather: Gather | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`residual [N, D]` plus the weighted sum of each row's experts of `x [N, D]`, float32.

    gather: as in `graphs.linear.products.Products.experts`.
    """
    gate_up, down, gate_up_bias, down_bias, limit, gelu, plain = experts
    assert not isinstance(gate_up, Quantized | Coded) and not isinstance(down, Quantized | Coded)
    count, per_row = routed.expert.shape
    blocks = _blocks(routed.expert.reshape(-1), len(gate_up))
    most, inner, width = len(blocks.expert), gate_up.shape[1] // experts.rows_of_feature, down.shape[1]

    def call(kernel: Any, features: int, shape: tuple[int, int], dtype: Any, **static: Any) -> Any:
        grid, out = (pl.cdiv(features, _TILE), most), jax.ShapeDtypeStruct(shape, dtype)
        return kernel_call(kernel, grid=grid, out_shape=out, warps=4, interpret=interpret, **static)

    rows = x.astype(gate_up.dtype)
    shape = (most * BLOCK_ROWS, inner)
    static = {"per_row": per_row, "limit": limit, "gelu": gelu, "plain": plain}
    hidden = call(gated_kernel, inner, shape, down.dtype, **static)(*blocks, rows, gate_up, gate_up_bias)
    hidden = hidden if gather is None else gather(hidden)
    out = call(down_kernel, width, (count * per_row, width), jnp.float32)(*blocks, hidden, down, down_bias)
    written = routed.expert[..., None] < len(gate_up)
    out = jnp.where(written, out.reshape(count, per_row, width), 0.0)
    return summed(routed, out, residual)


class _Blocks(NamedTuple):
    """expert: i32 `[M]`.   assignment: i32 `[M, R]`, indices into the flat list of assignments, A if empty.
    used: i32 `[1]`, how many blocks are not empty."""

    expert: jax.Array
    assignment: jax.Array
    used: jax.Array


def _blocks(expert: jax.Array, experts: int) -> _Blocks:
    """Group the assignments `expert [A]` by expert into blocks of `BLOCK_ROWS`; the value `experts` means none.

    Compares all pairs: an assignment's place is the number of earlier ones of its expert.
    """
    total = len(expert)
    index, every = jnp.arange(total, dtype=jnp.int32), jnp.arange(experts, dtype=jnp.int32)
    earlier = (expert[:, None] == expert) & (index[:, None] < index)
    rank = jnp.sum(earlier, axis=0, dtype=jnp.int32)
    members = jnp.sum(expert[:, None] == every, axis=0, dtype=jnp.int32)
    blocks = (members + BLOCK_ROWS - 1) // BLOCK_ROWS
    last = jnp.sum(jnp.where(every[:, None] <= every, blocks[:, None], 0), axis=0)
    some = min(experts, total)
    most = some + (total - some) // BLOCK_ROWS
    number = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.sum(last[:, None] <= number, axis=0, dtype=jnp.int32)
    first = jnp.append(last - blocks, most)[expert]
    block = jnp.where(expert < experts, first + rank // BLOCK_ROWS, most + index)
    empty = jnp.full((most, BLOCK_ROWS), total, jnp.int32)
    assignment = empty.at[block, rank % BLOCK_ROWS].set(index, mode="drop", unique_indices=True)
    return _Blocks(jnp.minimum(owner, experts - 1), assignment, last[-1:])


def gated_kernel(
    expert_ref: Ref,  # [M]
    assignment_ref: Ref,  # [M, R]
    used_ref: Ref,  # [1]
    rows_ref: Ref,  # [N, D]
    gate_up_ref: Ref,  # [E, 2 F, D], or [E, F, D] if plain
    bias_ref: Ref | None,  # [E, 2 F] or [E, F]
    hidden_ref: Ref,  # [M R, F]
    *,
    per_row: int,
    limit: float | None,
    gelu: bool,
    plain: bool,
) -> None:
    """The features between the products of a block's rows: gated, or if plain the square of ReLU."""
    first, block = pl.program_id(0) * _TILE, pl.program_id(1)
    inner, (count, width) = hidden_ref.shape[1], rows_ref.shape

    @pl.when(block < used_ref[0])
    def _() -> None:
        expert, assignment = expert_ref[block], _members(assignment_ref, block)
        feature = first + jnp.arange(_TILE)
        taken = assignment < count * per_row
        row = jnp.where(taken, assignment // per_row, 0)

        def product(part: int, x: jax.Array, column: jax.Array) -> jax.Array:
            at = (expert, (part * inner + feature)[:, None], column[None])
            inside = (feature < inner)[:, None] & (column < width)[None]
            return dot(x, load(gate_up_ref, at, inside).T)

        parts = range(1 if plain else 2)

        def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            column = step * _TILE + jnp.arange(_TILE)
            x = load(rows_ref, (row[:, None], column[None]), taken[:, None] & (column < width)[None])
            return tuple(sums[part] + product(part, x, column) for part in parts)

        nothing = jnp.zeros((BLOCK_ROWS, _TILE), jnp.float32)
        sums = lax.fori_loop(0, pl.cdiv(width, _TILE), add, tuple(nothing for _ in parts))
        if bias_ref is not None:
            here = feature < inner
            sums = tuple(
                sums[part] + load(bias_ref, (expert, part * inner + feature), here)[None] for part in parts
            )
        at = (block * BLOCK_ROWS + jnp.arange(BLOCK_ROWS)[:, None], feature[None])
        hidden = jnp.square(jnp.maximum(sums[0], 0.0)) if plain else gate(sums[0], sums[1], limit, gelu=gelu)
        store(hidden_ref, at, hidden, (feature < inner)[None] & taken[:, None])


def down_kernel(
    expert_ref: Ref,  # [M]
    assignment_ref: Ref,  # [M, R]
    used_ref: Ref,  # [1]
    hidden_ref: Ref,  # [M R, F]
    down_ref: Ref,  # [E, D, F]
    bias_ref: Ref | None,  # [E, D]
    out_ref: Ref,  # [A, D]
) -> None:
    """The expert's output for a block's rows, each written to the index of its assignment."""
    first, block = pl.program_id(0) * _TILE, pl.program_id(1)
    inner, (total, width) = hidden_ref.shape[1], out_ref.shape

    @pl.when(block < used_ref[0])
    def _() -> None:
        expert, assignment = expert_ref[block], _members(assignment_ref, block)
        feature = first + jnp.arange(_TILE)
        taken, place = assignment < total, block * BLOCK_ROWS + jnp.arange(BLOCK_ROWS)

        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            column = step * _TILE + jnp.arange(_TILE)
            inside = (column < inner)[None]
            hidden = load(hidden_ref, (place[:, None], column[None]), taken[:, None] & inside)
            at = (expert, feature[:, None], column[None])
            return sums + dot(hidden, load(down_ref, at, (feature < width)[:, None] & inside).T)

        nothing = jnp.zeros((BLOCK_ROWS, _TILE), jnp.float32)
        sums = lax.fori_loop(0, pl.cdiv(inner, _TILE), add, nothing)
        if bias_ref is not None:
            sums += load(bias_ref, (expert, feature), feature < width)[None]
        inside = taken[:, None] & (feature < width)[None]
        store(out_ref, (assignment[:, None], feature[None]), sums, inside)


def _members(assignment_ref: Ref, block: jax.Array) -> jax.Array:
    return load(assignment_ref, (block, jnp.arange(BLOCK_ROWS)))
