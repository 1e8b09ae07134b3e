"""The kernels of the backend `gpu`, in Pallas for Triton, and their pieces.

Triton supports only sizes that are powers of two: the rest of a head, a group or a tile is masked. A reference that a
model does not need is None.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.ops.gpu_call import Ref, dot, load, store

_SPLITS = 8  # that are loaded together: each load waits for memory once
_LEAST_ROWS = 16  # of a tensor core product


def write_kernel(
    slot_ref: Ref,  # [N]
    position_ref: Ref,  # [N]
    qkv_ref: Ref,  # [N, H + 2 KV, Dh] float32
    rope_ref: Ref,  # [N, 2, Dh/2]
    _keys_in: Ref,  # the outputs' own memory
    _values_in: Ref,
    tables_ref: Ref | None,  # [B, blocks]
    q_norm_ref: Ref | None,  # [Dh]
    k_norm_ref: Ref | None,
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    q_ref: Ref,  # [N, KV, G, Dh]
    *,
    eps: float,
    norm_last: bool,
) -> None:
    """Norm and rotate q and k of a token, and write its k and v unless its position is negative.

    norm_last: rotate first.
    """
    row = pl.program_id(0)
    kv_heads, groups = q_ref.shape[1:3]
    heads, half = kv_heads * groups, qkv_ref.shape[2] // 2
    position = position_ref[row]
    column = jnp.arange(_power_of_two(half))[None]
    cos = load(rope_ref, (row, 0, column), column < half)
    sin = load(rope_ref, (row, 1, column), column < half)

    def halves(first_head: int, head: jax.Array, inside: jax.Array) -> list[jax.Array]:
        return [load(qkv_ref, (row, first_head + head, part * half + column), inside) for part in range(2)]

    def normed(norm_ref: Ref | None, parts: list[jax.Array]) -> list[jax.Array]:
        if norm_ref is None:
            return parts
        square = sum(jnp.sum(part * part, axis=1, keepdims=True) for part in parts)
        scale = lax.rsqrt(square / (2 * half) + eps)
        weights = [load(norm_ref, (part * half + column,), column < half) for part in range(2)]
        return [part * scale * weight for part, weight in zip(parts, weights, strict=True)]

    def rotate(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first * cos - second * sin, second * cos + first * sin

    def ready(norm_ref: Ref | None, parts: list[jax.Array]) -> list[jax.Array]:
        return normed(norm_ref, list(rotate(*parts))) if norm_last else list(rotate(*normed(norm_ref, parts)))

    head = jnp.arange(_power_of_two(heads))[:, None]
    inside = (head < heads) & (column < half)
    for part, values in enumerate(ready(q_norm_ref, halves(0, head, inside))):
        store(q_ref, (row, head // groups, head % groups, part * half + column), values, inside)

    @pl.when(position >= 0)
    def _() -> None:
        head = jnp.arange(_power_of_two(kv_heads))[:, None]
        inside = (head < kv_heads) & (column < half)
        new_keys = ready(k_norm_ref, halves(heads, head, inside))
        new_values = halves(heads + kv_heads, head, inside)
        block, offset = _locate(tables_ref, slot_ref[row], position, keys_ref.shape[2])
        for part in range(2):
            at = (block, head, offset, part * half + column)
            store(keys_ref, at, new_keys[part], inside)
            store(values_ref, at, new_values[part], inside)


def split_kernel(
    slot_ref: Ref,  # [N]
    position_ref: Ref,
    q_ref: Ref,  # [N, KV, G, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    tables_ref: Ref | None,  # [B, blocks]
    parts_ref: Ref,  # [N, KV, J, G, Dh] float32
    peak_ref: Ref,  # [N, KV, J, G] float32
    total_ref: Ref,
    *,
    form: AttentionForm,
) -> None:
    """Softmax of one row and key/value head over one split of its keys."""
    row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    groups, head_dim = q_ref.shape[2:]
    slot, position, size = slot_ref[row], position_ref[row], key_tile(keys_ref)

    @pl.when((split * size <= position) & (_lowest(position, form.window) < (split + 1) * size))
    def _() -> None:
        group, column = jnp.arange(whole_tile(groups)), jnp.arange(_power_of_two(head_dim))
        inside = (group[:, None] < groups) & (column[None] < head_dim)
        q = load(q_ref, (row, kv_head, group[:, None], column[None]), inside)
        peak, total, weighted = _attend(
            q,
            functools.partial(_load_tile, keys_ref, tables_ref, slot, kv_head),
            functools.partial(_load_tile, values_ref, tables_ref, slot, kv_head),
            split * size + jnp.arange(size),
            form=form,
            position=jnp.broadcast_to(position, group.shape),
        )
        at = (row, kv_head, split, group[None], column[:, None])
        store(parts_ref, at, weighted, (group[None] < groups) & (column[:, None] < head_dim))
        store(peak_ref, (row, kv_head, split, group), peak, group < groups)
        store(total_ref, (row, kv_head, split, group), total, group < groups)


def combine_kernel(
    position_ref: Ref,  # [B]
    parts_ref: Ref,  # [B, KV, J, G, Dh]
    peak_ref: Ref,  # [B, KV, J, G]
    total_ref: Ref,
    sinks_ref: Ref | None,  # [H]
    out_ref: Ref,  # [B, KV, G, Dh]
    *,
    size: int,
    window: int | None,
) -> None:
    """Merge the splits of a row and key/value head, first to last."""
    row, kv_head = pl.program_id(0), pl.program_id(1)
    groups, head_dim = out_ref.shape[2:]
    group, column = jnp.arange(_power_of_two(groups)), jnp.arange(_power_of_two(head_dim))
    inside = (group[None] < groups) & (column[:, None] < head_dim)  # [Dh, G]
    position = position_ref[row]
    first, end = _lowest(position, window) // size, pl.cdiv(position + 1, size)

    def state_of(split: jax.Array) -> State:
        seen = (split >= first) & (split < end)
        at, mine = (row, kv_head, split, group), seen & (group < groups)
        each = (row, kv_head, split, group[None], column[:, None])
        return (
            jnp.where(mine, load(peak_ref, at, mine), -jnp.inf),
            load(total_ref, at, mine),
            load(parts_ref, each, seen & inside),
        )

    def add(step: jax.Array, state: State) -> State:
        return functools.reduce(_merged, [state_of(step * _SPLITS + each) for each in range(_SPLITS)], state)

    steps = first // _SPLITS, pl.cdiv(end, _SPLITS)
    state = lax.fori_loop(*steps, add, _nothing(len(group), len(column)))
    if sinks_ref is not None:
        state = _with_sink(state, load(sinks_ref, (kv_head * groups + group,), group < groups))
    store(out_ref, (row, kv_head, group[None], column[:, None]), _divide(state), inside)


def prefill_kernel(
    slot_ref: Ref,  # [P]
    start_ref: Ref,
    count_ref: Ref,
    q_ref: Ref,  # [P, T, H, Dh]
    keys_ref: Ref,  # [B, KV, S, Dh]
    values_ref: Ref,
    tables_ref: Ref | None,  # [B, blocks]
    sinks_ref: Ref | None,  # [H]
    reach_ref: Ref | None,  # [P, T]
    out_ref: Ref,  # [P, T, H, Dh]
    *,
    tile: int,
    form: AttentionForm,
) -> None:
    """One head of a tile of a lane's queries over all keys they see."""
    lane, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, width, heads, head_dim = q_ref.shape
    kv_head = head // (heads // keys_ref.shape[1])
    slot, start, count = slot_ref[lane], start_ref[lane], count_ref[lane]
    query, column = part * tile + jnp.arange(tile), jnp.arange(_power_of_two(head_dim))
    inside = (query[:, None] < count) & (column[None] < head_dim)
    at = (lane, query[:, None], head, column[None])
    longest = jnp.where(part * tile < count, start + jnp.minimum((part + 1) * tile, count), 0)
    # The tile's rest takes the last query's position: what lies behind it in the slot may be stale NaN.
    position, last = jnp.minimum(start + query, longest - 1), None
    if reach_ref is not None:
        reach = load(reach_ref, (lane, query), query < count)
        last = jnp.where(query < count, reach - 1, position)
        longest = jnp.maximum(longest, jnp.max(last) + 1)
    lowest = _lowest(start + part * tile, form.window)
    q, size = load(q_ref, at, inside), key_tile(keys_ref)

    def add(split: jax.Array, state: State) -> State:
        found = _attend(
            q,
            functools.partial(_load_tile, keys_ref, tables_ref, slot, kv_head),
            functools.partial(_load_tile, values_ref, tables_ref, slot, kv_head),
            split * size + jnp.arange(size),
            form=form,
            position=position,
            last=last,
        )
        return _merged(state, found)

    state = lax.fori_loop(lowest // size, pl.cdiv(longest, size), add, _nothing(tile, len(column)))
    if sinks_ref is not None:
        state = _with_sink(state, jnp.full((tile,), sinks_ref[head]))
    at = (lane, query[None], head, column[:, None])
    store(out_ref, at, _divide(state), (query[None] < width) & (column[:, None] < head_dim))


# Of R queries: the largest score [R], the sum of weights [R], weighted values [Dh, R].
State = tuple[jax.Array, jax.Array, jax.Array]


def _attend(
    q: jax.Array,
    load_keys: Callable[[jax.Array, jax.Array], jax.Array],
    load_values: Callable[[jax.Array, jax.Array], jax.Array],
    key: jax.Array,
    *,
    form: AttentionForm,
    position: jax.Array,
    last: jax.Array | None = None,
) -> State:
    """Softmax of `q [R, Dh]` at `position [R]` over the keys `key [tile]`, whose loaders also take which are wanted.

    last: `[R]`, the last key that each query sees; None: its own.
    Queries are the columns of both products, so that their number changes no bit.
    """
    last = position if last is None else last
    visible = key[:, None] <= last[None]  # [tile, R]
    if form.window is not None:
        visible &= key[:, None] > position[None] - form.window
    any_query = key <= jnp.max(last)
    keys, values = (
        load_keys(key, any_query),
        load_values(key, any_query),
    )  # both before the first is waited for
    scores = dot(keys, q.T) * form.scale
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.max(scores, axis=0)
    weights = jnp.exp(scores - _finite(peak)[None])
    return peak, jnp.sum(weights, axis=0), dot(values.T, weights.astype(values.dtype))


def _merged(state: State, found: State) -> State:
    """What was seen before, and then by the next split. A split that a query does not see changes no bit."""
    (peak, total, weighted), (new_peak, new_total, new_weighted) = state, found
    highest = jnp.maximum(peak, new_peak)
    base = _finite(highest)
    before, now = jnp.exp(peak - base), jnp.exp(new_peak - base)
    return highest, total * before + new_total * now, weighted * before[None] + new_weighted * now[None]


def _finite(peak: jax.Array) -> jax.Array:
    """The largest score, or 0 if no key was seen."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def _lowest(position: jax.Array, window: int | None) -> Any:
    """The first key that a query at `position` sees."""
    return 0 if window is None else jnp.maximum(position + 1 - window, 0)


def _with_sink(state: State, sink: jax.Array) -> State:
    """One more logit per row, without a value: `sink [R]`."""
    peak, total, weighted = state
    highest = jnp.maximum(peak, sink)
    scale = jnp.exp(peak - highest)
    return highest, total * scale + jnp.exp(sink - highest), weighted * scale[None]


def _nothing(rows: int, columns: int) -> State:
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((columns, rows), jnp.float32),
    )


def _divide(state: State) -> jax.Array:
    """Weighted mean `[Dh, R]`; zero where nothing was attended to."""
    _, total, weighted = state
    return weighted / jnp.where(total > 0, total, 1.0)[None]


def _load_tile(
    ref: Ref, tables_ref: Ref | None, slot: jax.Array, kv_head: jax.Array, key: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Keys or values `[tile, Dh]` of a cache `[B, KV, S, Dh]`, zero where not wanted."""
    size, head_dim = ref.shape[2:]
    column = jnp.arange(_power_of_two(head_dim))[None]
    inside = wanted[:, None] & (column < head_dim)
    block, offset = _locate(tables_ref, slot, key[:, None], size, wanted[:, None])
    return load(ref, (block, kv_head, offset, column), inside)


def _locate(
    tables_ref: Ref | None, slot: jax.Array, position: jax.Array, size: int, wanted: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Block, and position in it, of a position of a slot. Without tables a slot is a block of its own."""
    if tables_ref is None:
        return slot, position
    if wanted is None:
        return tables_ref[slot, position // size], position % size
    return load(tables_ref, (slot, position // size), wanted), position % size


def _power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`: Triton knows no other sizes."""
    return 1 << (size - 1).bit_length()


def key_tile(keys: Ref | jax.Array) -> int:
    """Keys of one split of a cache `[B, KV, S, Dh]`: it divides a span, and two of them fit into shared memory."""
    return 128 if keys.shape[3] * keys.dtype.itemsize <= 256 else 64


def whole_tile(size: int) -> int:
    """Rows of a product that holds `size` rows."""
    return max(_LEAST_ROWS, _power_of_two(size))
