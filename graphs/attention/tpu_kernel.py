"""The kernel of the backend `tpu`, in Pallas for Mosaic.

It gets its references as a record by name; what a call does not have is absent. In HBM: keys, values `[B, KV, S, Dh]`.
In scalar memory: slot, start, count, end `[P]`, tables `[B, blocks]`. In VMEM, of this grid step: q `[1, KV, R, Dh]`,
last and seen `[1, R, 1]`, sinks `[KV, R, 1]`, new_keys, new_values `[1, KV, W, Dh]`, out `[1, KV, R, Dh]`, two
buffers of tiles `[2, KV, tile, Dh]`, old_keys, old_values `[KV, W, Dh]`, and the state of the sums.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xla_engine.graphs.forms import AttentionForm

Ref = Any
_UNROLLED = 8  # heads whose products are written one after the other, so that the compiler can overlap them


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSizes:
    """tile: keys that are added together. piece: of them, how many lie together in memory at least. unit: positions of
    a register tile. passes: 2 if all lanes write before any reads, else 1."""

    tile: int
    piece: int
    unit: int
    passes: int


def register_rows(dtype: jnp.dtype) -> int:
    """Positions of a register tile: those of 32 bits have eight, shorter ones share words."""
    return 32 // dtype.itemsize


def ragged_kernel(refs: Mapping[str, Ref], sizes: RaggedSizes, form: AttentionForm) -> None:
    """A grid step `(pass, lane)`. A lane without a token reads nothing, writes nothing, and has zeros.

    last: the position of each query. seen: one past the last key that it sees. end: the largest `seen` of the lane.
    """
    turn, lane = pl.program_id(0), pl.program_id(1)
    begin = refs["start"][lane]
    live = refs["count"][lane] > 0

    if "new_keys" in refs:

        @pl.when(live & (turn == 0))
        def write() -> None:
            _write(refs, sizes, lane, begin)

    @pl.when(live & (turn == sizes.passes - 1))
    def attend() -> None:
        _attend(refs, sizes, form, lane)

    @pl.when(jnp.logical_not(live))
    def clear() -> None:
        refs["out"][...] = jnp.zeros(refs["out"].shape, jnp.float32)


def _place(refs: Mapping[str, Ref], lane: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Block, and position in it, of a position of a lane's slot. Without tables a slot is a block."""
    slot = refs["slot"][lane]
    if "tables" not in refs:
        return slot, position
    size = refs["keys"].shape[2]
    return refs["tables"][slot, _div(position, size)], lax.rem(position, jnp.int32(size))


def _div(value: jax.Array, by: int) -> jax.Array:
    """The quotient, for values from 0 on: Mosaic asks the machine's chip how to divide others."""
    return lax.div(value, jnp.int32(by))


def _write(refs: Mapping[str, Ref], sizes: RaggedSizes, lane: jax.Array, begin: jax.Array) -> None:
    """Write a lane's new positions, from `begin` on, with the rest of their register tiles."""
    unit, (_, rows, _) = sizes.unit, refs["old_keys"].shape
    first, end = _div(begin, unit) * unit, begin + refs["count"][lane]
    pairs = [("keys", "old_keys", "new_keys"), ("values", "old_values", "new_values")]

    def copies(index: jax.Array, *, back: bool) -> list[Any]:
        block, offset = _place(refs, lane, first + index * unit)
        at = pl.ds(pl.multiple_of(offset, unit), unit)
        here = pl.ds(pl.multiple_of(index * unit, unit), unit)
        found = []
        for which, (store, old, _) in enumerate(pairs):
            ends = refs[store].at[block, :, at, :], refs[old].at[:, here, :]
            found.append(pltpu.make_async_copy(*(ends[::-1] if back else ends), refs["moved"].at[which]))
        return found

    def each(action: str, *, back: bool) -> None:
        def one(index: jax.Array, carry: int) -> int:
            for copy in copies(index, back=back):
                getattr(copy, action)()
            return carry

        lax.fori_loop(0, _div(end - first + unit - 1, unit), one, 0)

    each("start", back=False)
    each("wait", back=False)
    position = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    inside = (position >= begin) & (position < end)
    for _, old, new in pairs:
        for head in range(refs[old].shape[0]):
            refs[old][head] = jnp.where(inside, refs[new][0, head], refs[old][head])
    each("start", back=True)
    each("wait", back=True)


def _attend(refs: Mapping[str, Ref], sizes: RaggedSizes, form: AttentionForm, lane: jax.Array) -> None:
    """Attend to the tiles of keys that the queries of this grid step see, from the first to the last."""
    last_of, seen = refs["last"][0], refs["seen"][0]  # [R, 1]
    end = refs["end"][lane]
    lowest = jnp.int32(0)
    if form.window is not None:
        lowest = jnp.maximum(refs["start"][lane] + 1 - form.window, 0)
    first, last = _div(lowest, sizes.tile), _div(end + sizes.tile - 1, sizes.tile)
    heads = refs["q"].shape[1]
    refs["peak"][...] = jnp.full(refs["peak"].shape, -jnp.inf, jnp.float32)
    refs["total"][...] = jnp.zeros(refs["total"].shape, jnp.float32)
    refs["weighted"][...] = jnp.zeros(refs["weighted"].shape, jnp.float32)

    def each(action: str, tile: jax.Array) -> None:
        """Start the copies of a tile, or wait for them."""
        for piece in range(sizes.tile // sizes.piece):
            at = tile * sizes.tile + piece * sizes.piece

            @pl.when(at < end)
            def _(at: jax.Array = at, piece: int = piece) -> None:
                block, offset = _place(refs, lane, at)
                source = pl.ds(pl.multiple_of(offset, sizes.unit), sizes.piece)
                here = pl.ds(piece * sizes.piece, sizes.piece)
                for which, (store, tiles) in enumerate((("keys", "key_tiles"), ("values", "value_tiles"))):
                    copy = pltpu.make_async_copy(
                        refs[store].at[block, :, source, :],
                        refs[tiles].at[tile & 1, :, here, :],
                        refs["arrived"].at[tile & 1, which],
                    )
                    getattr(copy, action)()

    def add(tile: jax.Array, carry: int) -> int:
        @pl.when(tile + 1 < last)
        def _() -> None:
            each("start", tile + 1)

        each("wait", tile)
        key = tile * sizes.tile + lax.broadcasted_iota(jnp.int32, (1, sizes.tile), 1)
        visible = key < seen  # [R, tile]
        if form.window is not None:
            visible &= key > last_of - form.window
        stored = tile * sizes.tile + lax.broadcasted_iota(jnp.int32, (sizes.tile, 1), 0) < end
        one = functools.partial(_add_head, refs, form, tile & 1, visible, stored)
        if heads <= _UNROLLED:
            for head in range(heads):
                one(head)
        else:
            lax.fori_loop(0, heads, lambda head, carry: (one(head), carry)[1], 0)
        return carry

    each("start", first)
    lax.fori_loop(first, last, add, 0)
    for head in range(heads):
        peak, total, weighted = (refs[name][head] for name in ("peak", "total", "weighted"))
        if "sinks" in refs:
            sink = refs["sinks"][head]
            highest = jnp.maximum(peak, sink)
            scale = jnp.exp(peak - highest)
            total, weighted = total * scale + jnp.exp(sink - highest), weighted * scale
        refs["out"][0, head] = weighted / total


def _add_head(
    refs: Mapping[str, Ref],
    form: AttentionForm,
    buffer: jax.Array,
    visible: jax.Array,
    stored: jax.Array,
    head: Any,
) -> None:
    """Add a tile of one key/value head. visible: `[R, tile]`. stored `[tile, 1]`: what has been written."""
    keys = refs["key_tiles"][buffer, head]
    values = refs["value_tiles"][buffer, head]
    values = jnp.where(stored, values, jnp.zeros_like(values))
    scores = _product(refs["q"][0, head], keys, 1) * form.scale
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    before = refs["peak"][head]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    base = jnp.where(peak > -jnp.inf, peak, 0.0)  # 0 if no key was seen
    weights, scale = jnp.exp(scores - base), jnp.exp(before - base)
    refs["peak"][head] = peak
    refs["total"][head] = refs["total"][head] * scale + jnp.sum(weights, axis=1, keepdims=True)
    refs["weighted"][head] = refs["weighted"][head] * scale + _product(
        weights.astype(values.dtype), values, 0
    )


def _product(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """`left [R, K]` by `right`, whose axis `axis` has the K: float32 `[R, N]`."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
