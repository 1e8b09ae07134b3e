"""Routed experts (Shazeer et al. 2017): the choice of experts for each row, and the sum of their outputs.

The products run in pure JAX, or in one C++ call per layer (`native/experts_layer.h`), in bf16, int8 or the encoding of
a file.

Everything is row-wise. Which rows share an expert decides the place of a row in a product, but not its bits: rows are
grouped into blocks of fixed size, and each row sums its experts in its own order.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.ops.coded import Coded
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.int8 import Quantized, grouped_product
from xla_engine.graphs.ops.norms import flatly
from xla_engine.graphs.ops.reductions import largest_by_rank

BLOCK_ROWS = 16  # rows of one expert per product (findings/experts_and_recurrent_layers.md)
_LEAST_SUM = 1e-20  # as transformers has it
_CLAMPED_SLOPE = 1.702  # slope of the sigmoid in gpt-oss's gate


Gather = Callable[[jax.Array], jax.Array]  # `[A, F of a device, ...]` to `[A, F of all, ...]`


class Experts(NamedTuple):
    """Weights of one layer's experts.

    gate_up: `[E, 2 F, D]`, gates first.   down: `[E, D, F]`. For C++ also coded, `[E 2 F, D]` and `[E D, F]`, both in
    the same order of codes.
    gate_up_bias: f32 `[E, 2 F]`, down_bias: f32 `[E, D]`, or None.
    limit: of the clamped gate, see `gate`. gelu: its activation.
    plain: there is no gate: gate_up is `[E, F, D]`, its bias `[E, F]`, and the activation the square of ReLU.
    """

    gate_up: jax.Array | Quantized | Coded
    down: jax.Array | Quantized | Coded
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    limit: float | None = None
    gelu: bool = False
    plain: bool = False

    @property
    def number(self) -> int:
        assert not isinstance(self.down, Coded)
        return len(self.down.values if isinstance(self.down, Quantized) else self.down)

    @property
    def rows_of_feature(self) -> int:
        """How many rows of gate_up a feature between the products is made of."""
        return 1 if self.plain else 2

    def activated(self, both: jax.Array) -> jax.Array:
        """The features between the products, flat, from those of gate_up `[2 F, R]`, or `[F, R]` if plain."""
        if self.plain:
            return jnp.square(jax.nn.relu(both.reshape(-1)))
        gates, ups = both.reshape(2, -1)
        return gate(gates, ups, self.limit, gelu=self.gelu)

    @property
    def row_dtype(self) -> jnp.dtype:
        """The dtype of the rows that both products take; those in eight bits quantise their float32 input."""
        if isinstance(self.down, Coded):
            return self.down.form.rows
        return jnp.dtype(jnp.float32) if isinstance(self.down, Quantized) else self.down.dtype


class Route(NamedTuple):
    """expert: i32 `[N, K]`, E for none.   weight: f32 `[N, K]`, factor of each expert's output."""

    expert: jax.Array
    weight: jax.Array


class Groups(NamedTuple):
    """A row takes its experts from the best `chosen` of `number` groups of neighbours (DeepSeek-V2, arXiv 2405.04434,
    section 2.2.2)."""

    number: int = 1
    chosen: int = 1


ONE_GROUP = Groups()


def route(
    logits: jax.Array,
    count: int,
    *,
    renormalise: bool,
    groups: Groups = ONE_GROUP,
    live: jax.Array | None = None,
) -> Route:
    """The `count` experts with the largest `logits [N, E]` per row; of equal ones the lower index first.

    Weights are softmax probabilities over all experts, or with `renormalise` over the chosen ones. A group is as good
    as its best expert. Rows that are not `live [N]` get no expert, so that no weights are read for them.
    """
    chosen, expert = _largest(_of_best_groups(logits, groups, 1), count)
    weight = flatly(jnp.exp, chosen - chosen[:, :1])
    over = weight if renormalise else flatly(jnp.exp, logits - chosen[:, :1])
    return Route(_of_live(expert, logits.shape[1], live), weight / sum_last(over))


def route_by_sigmoid(
    logits: jax.Array,
    correction: jax.Array,
    count: int,
    *,
    renormalise: bool,
    factor: float,
    groups: Groups = ONE_GROUP,
    live: jax.Array | None = None,
) -> Route:
    """As `route`, by the largest `sigmoid(logits) + correction [E]`; weights are sigmoids, times `factor`.

    A group is as good as the sum of its best two experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    scores = flatly(jax.nn.sigmoid, logits)
    _, expert = _largest(_of_best_groups(scores + correction, groups, 2), count)
    weight = jnp.take_along_axis(scores, expert, axis=1)
    if renormalise:
        weight = weight / (sum_last(weight) + _LEAST_SUM)
    return Route(_of_live(expert, logits.shape[1], live), weight * factor)


def _of_best_groups(values: jax.Array, groups: Groups, best: int) -> jax.Array:
    """`values [N, E]`, and minus infinity for experts outside the best groups. best: how many experts' values a group
    counts for."""
    if groups.chosen == groups.number:
        return values
    rows, experts = values.shape
    found, _ = _largest(values.reshape(rows * groups.number, -1), best)
    _, chosen = _largest(sum_last(found).reshape(rows, groups.number), groups.chosen)
    is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(groups.number), axis=1)  # [N, G]
    return jnp.where(jnp.repeat(is_chosen, experts // groups.number, axis=1), values, -jnp.inf)


def _largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest `values [N, E]` of each row and their indices, `[N, count]`."""
    found, index = lax.platform_dependent(
        values,
        cpu=lambda values: tuple(lax.top_k(values, count)),
        default=lambda values: tuple(found.T for found in largest_by_rank(values.T, count)),
    )
    return found, index


def _of_live(expert: jax.Array, experts: int, live: jax.Array | None) -> jax.Array:
    expert = expert if live is None else jnp.where(live[:, None], expert, experts)
    return expert.astype(jnp.int32)


def gate(gates: jax.Array, ups: jax.Array, limit: float | None, *, gelu: bool = False) -> jax.Array:
    """SwiGLU (Shazeer 2020), `silu(gate) up`, or with GELU by tanh; with a `limit` the clamped form of gpt-oss.

    That is `(up + 1) gate sigmoid(1.702 gate)`, with gates clamped from above and ups on both sides at `limit`.
    """
    if gelu:
        return jax.nn.gelu(gates, approximate=True) * ups
    if limit is None:
        return jax.nn.silu(gates) * ups
    gates, ups = jnp.minimum(gates, limit), jnp.clip(ups, -limit, limit)
    return (ups + 1) * (gates * jax.nn.sigmoid(_CLAMPED_SLOPE * gates))


def blocked_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
) -> jax.Array:
    """`residual [N, D]` plus the weighted sum of each row's experts of `x [N, D]`, float32, in pure JAX.

    Processes one block of rows of one expert at a time, so that an expert's weights are read once per block, and those
    of unused experts not at all. With `gather`, the first products of all blocks run before the second ones.
    """
    gate_up, down, gate_up_bias, down_bias = experts[:4]
    assert not isinstance(gate_up, Coded) and not isinstance(down, Coded)
    (count, features), per_row = residual.shape, routed.expert.shape[1]
    blocks = _blocks(routed.expert.reshape(-1), experts.number)
    rows = x.astype(experts.row_dtype)

    def gated(expert: jax.Array, place: jax.Array) -> jax.Array:
        block = rows[jnp.minimum(place // per_row, count - 1)]  # [R, D]
        both = _product(gate_up, expert, block, 1)  # [2 F, R]
        if gate_up_bias is not None:
            both = both + gate_up_bias[expert][:, None]
        hidden = experts.activated(lax.optimization_barrier(both)).astype(experts.row_dtype)
        return lax.optimization_barrier(hidden).reshape(-1, BLOCK_ROWS)

    def put(out: jax.Array, place: jax.Array, hidden: jax.Array, expert: jax.Array) -> jax.Array:
        result = _product(down, expert, hidden, 0)  # [D, R]
        if down_bias is not None:
            result = result + down_bias[expert][:, None]
        result = lax.optimization_barrier(result)  # otherwise XLA swaps the operands (findings/products.md)
        return out.at[place].set(result.T, mode="drop", unique_indices=True)

    def multiply(index: jax.Array, out: jax.Array) -> jax.Array:
        expert, place = blocks.expert[index], blocks.assignment[index]
        return put(out, place, gated(expert, place), expert)

    out = jnp.zeros((count * per_row, features), jnp.float32)
    if gather is None:
        out = lax.fori_loop(0, blocks.used, multiply, out)
    else:
        most = len(blocks.expert)
        rows_of_expert = (gate_up.values if isinstance(gate_up, Quantized) else gate_up).shape[1]
        inner = rows_of_expert // experts.rows_of_feature

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
    """`residual [N, D]` plus the weighted outputs `out [N, K, D]` of each row's experts, added one after the other."""
    total = residual
    for index in range(out.shape[1]):
        total = total + routed.weight[:, index, None] * out[:, index]
    return total


class _Blocks(NamedTuple):
    """expert: i32 `[M]`.   assignment: i32 `[M, R]`, indices into the flat list of assignments; empty places have
    distinct indices past its end.   used: i32, how many blocks are not empty."""

    expert: jax.Array
    assignment: jax.Array
    used: jax.Array


def _blocks(expert: jax.Array, experts: int) -> _Blocks:
    """Group the assignments `expert [A]` by expert into blocks of `BLOCK_ROWS`; the value `experts` means none."""
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


EXPERTS = "xla_engine_experts"
GATED_EXPERTS, DOWN_EXPERTS = "xla_engine_gated_experts", "xla_engine_down_experts"


def native_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, *, isa: str
) -> jax.Array:
    """As `graphs.experts.routing.blocked_experts`. D and F must be multiples of 32. isa: selects the library."""
    call = jax.ffi.ffi_call(
        f"{EXPERTS}_{_kind(experts.down)}_{isa}", jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    )
    biases = (_or_nothing(bias) for bias in (experts.gate_up_bias, experts.down_bias))
    weights = (*parts_of(experts.gate_up), *parts_of(experts.down), *biases)
    result: jax.Array = call(
        x.astype(experts.row_dtype),
        *routed,
        *weights,
        residual,
        **_activation(experts),
    )
    return result


def shared_native_experts(
    experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather, *, isa: str
) -> jax.Array:
    """The same in two calls, for devices that each have some features of both products; the bits are the same.

    gather: as in `graphs.linear.products.Products.experts`; rows without an expert are zero in its input.
    """
    gate_up, down, gate_up_bias, down_bias = experts[:4]
    inner = _rows(gate_up) * residual.shape[1] // (experts.rows_of_feature * _rows(down))
    gated = jax.ffi.ffi_call(
        f"{GATED_EXPERTS}_{_kind(gate_up)}_{isa}",
        jax.ShapeDtypeStruct((routed.expert.size, inner), experts.row_dtype),
    )
    hidden: jax.Array = gated(
        x.astype(experts.row_dtype),
        routed.expert,
        *parts_of(gate_up),
        _or_nothing(gate_up_bias),
        **_activation(experts),
    )
    call = jax.ffi.ffi_call(
        f"{DOWN_EXPERTS}_{_kind(down)}_{isa}", jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    )
    result: jax.Array = call(gather(hidden), *routed, *parts_of(down), _or_nothing(down_bias), residual)
    return result


def _activation(experts: Experts) -> dict[str, Any]:
    """What stands between the products, as the C++ kernels take it."""
    return {"limit": np.float32(experts.limit or 0), "gelu": experts.gelu, "plain": experts.plain}


def _kind(weight: jax.Array | Quantized | Coded) -> str:
    """The library: weights that are unpacked to bf16 are multiplied where those in bf16 are."""
    if isinstance(weight, Coded) and weight.form.order == "fours":
        return "fours"
    return "int8" if isinstance(weight, Quantized) else "bf16"


def _rows(weight: jax.Array | Quantized | Coded) -> int:
    """The rows of all experts."""
    return weight.form.features if isinstance(weight, Coded) else math.prod(parts_of(weight)[0].shape[:2])


def parts_of(weight: jax.Array | Quantized | Coded) -> tuple[jax.Array, jax.Array]:
    """A weight and its scales, which are empty unless it is int8, as the C++ kernels take them."""
    if isinstance(weight, Quantized):
        return weight
    return weight.values if isinstance(weight, Coded) else weight, jnp.zeros((0, 0), jnp.bfloat16)


def _or_nothing(bias: jax.Array | None) -> jax.Array:
    return jnp.zeros((0, 0), jnp.float32) if bias is None else bias
