"""The prefill step: P lanes of T prompt tokens, written directly into the slots of the donated cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import AttentionCall, LayerCache
from xla_engine.graphs.kv_cache.cache import KVCache
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.recurrent.layer import (
    PendingInputs,
    recurrent_prefill,
    recurrent_verify,
)
from xla_engine.graphs.row_state.rows import Extents, Rows, pack, targets, unpack, with_rows
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.sampler import sample
from xla_engine.graphs.steps.advance import advance, ends
from xla_engine.graphs.steps.step import StepForm, StepState, attending

if TYPE_CHECKING:
    from xla_engine.graphs.model.decoder import Decoder

Hidden = Callable[[jax.Array, Call], Iterator[jax.Array]]  # see `Decoder.hidden`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The input of a prefill call. An unused lane has count 0 and is_last false.

    tokens: i32 `[P, T]`, padded.
    slot: i32 `[P]`, the slot that the lane writes to.
    start: i32 `[P]`, the first position it writes.
    count: i32 `[P]`, tokens that are not padding.
    is_last: bool `[P]`, the chunk completes its prompt: sample the first token and activate the row. The next five
        fields are read only for these lanes.
    prompt_length: i32 `[P]`, of the prompt itself; later tokens were generated and are prefilled again.
    max_tokens: i32 `[P]`, the most tokens still to sample.
    min_tokens: i32 `[P]`, the fewest tokens still to sample.
    stop_ids: i32 `[P, E]`, ids that end the row, padded with -1.
    sampling: the request's sampling parameters.
    whole: bool `[P]`, the output of the last layer is read at every position of the lane, not only where a token is
        sampled; None: true for all lanes.
    adapter: i32 `[P]`, as in `Rows`, for all lanes; None in an engine without adapters.
    feature: i32 `[P, T]`, the row of the feature buffer that takes the place of the token's embedding; -1: none. None
        in an engine without pictures.
    reach: i32 `[P, T]`, as in `AttentionCall`; None if no position sees what follows it. Tokens of a picture that see
        each other must all be in the call.
    positions: i32 `[P, T, 3]`, each token's position in time, rows and columns, by which its key and query turn; None:
        all are its place in the slot. rope_offset: i32 `[P]`, as in `Rows`, or None.
    """

    tokens: jax.Array
    slot: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    prompt_length: jax.Array
    max_tokens: jax.Array
    min_tokens: jax.Array
    stop_ids: jax.Array
    sampling: SamplingRows
    whole: jax.Array | None = None
    adapter: jax.Array | None = None
    feature: jax.Array | None = None
    reach: jax.Array | None = None
    positions: jax.Array | None = None
    rope_offset: jax.Array | None = None


class PrefillForm(NamedTuple):
    """The static part of a prefill call.

    step: its `key_length` is at least the end of every lane.
    head_rows: rows of output head and sampler, at least P: the same in every prefill graph so that no bit depends on
        the number of lanes.
    taps: layers whose input is returned. axes: which of `Lanes.positions` each of Dh/2 angles is of.
    only_windows: whether `Lanes.reach` is for layers with a sliding window alone.
    blank_token: whose embeddings of each layer positions of pictures take, if the model has some.
    """

    step: StepForm
    head_rows: int
    taps: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    only_windows: bool = False
    blank_token: int | None = None


class Fed(NamedTuple):
    """Lanes of tokens that go through the layers.

    tokens: i32 `[P, T]`. lanes: where they are in their slots. block_tables: as in `Rows`.
    adapter: i32 `[P]`, as in `Rows`; None: none.
    read: the rows that are read after the last layer, bool `[P * T]`; None: all. reach: as in `AttentionCall`.
    only_windows: as in `PrefillForm`.
    angles: cosines and sines of the tokens, `[K, P, T, 2, Dh/2]`; None: those of their places in the slot.
    """

    tokens: jax.Array
    lanes: Extents
    block_tables: jax.Array | None = None
    adapter: jax.Array | None = None
    read: jax.Array | None = None
    reach: jax.Array | None = None
    angles: jax.Array | None = None
    only_windows: bool = False


def prefill_chunk(
    form: PrefillForm, state: StepState, lanes: Lanes, features: jax.Array | None = None
) -> tuple[KVCache, Rows, jax.Array, jax.Array, jax.Array, *tuple[jax.Array, ...]]:
    """Run one chunk per lane; a lane that completes its prompt samples the first token and activates its row.

    form: static.
    features: the feature buffer f32 `[R, (1 + d) D]`, for `Lanes.feature`: what takes an embedding's place, and what
    is added to the residual stream after each of the first d layers (DeepStack, Meng et al. 2024).
    Returns cache, rows, the packed samples `[2, P]` (token -1 for lanes that do not complete a prompt), the most
    likely tokens as packed by `graphs.sampling.logprobs.logprobs`, and the residual stream after the last layer f32
    `[P * T, D]`, arbitrary at positions that are not read. With taps, also the residual stream before these layers,
    f32 `[P * T, taps * D]`.
    """
    count = len(lanes.tokens)
    spec, rope, tables = form.step.spec, state.rope, state.tables
    rows = state.rows.with_tables(tables)
    model = spec.merge(state.weights)
    products = spec.products or ROWS_LEFT
    hidden = model.hidden if features is None else _merging(model, lanes, features, form.blank_token)
    fed = Fed(
        lanes.tokens,
        Extents(lanes.slot, lanes.start, lanes.count),
        rows.block_tables,
        adapter=lanes.adapter,
        read=None if lanes.whole is None else _read(lanes),
        reach=lanes.reach,
        only_windows=form.only_windows,
        angles=None if lanes.positions is None else _grid_angles(rope, lanes.positions, form.axes),
    )
    updated, streams = through_layers(form.step, hidden, rope, state.cache, fed, clears=True)
    final = behind_last(streams[-1], lanes.count)
    length = lanes.start + lanes.count
    widen = functools.partial(_widen, form.head_rows)
    logits = model.logits(widen(final), products.for_rows(widen(lanes.is_last)))  # of head_rows rows
    rows = _remember(rows, lanes)
    context = SamplingContext(
        live=widen(lanes.is_last),
        slot=widen(lanes.slot),
        length=widen(length),
        prompt_length=widen(lanes.prompt_length),
        min_remaining=widen(lanes.min_tokens),
        stop_ids=widen(lanes.stop_ids),
        history=rows.history,
        tables=tables,
        block_tables=rows.block_tables,
    )
    sampled = sample(
        logits,
        unpack(widen(pack(lanes.sampling)), lanes.sampling),
        context.length,
        context,
        processed_logprobs=form.step.processed_logprobs,
        native=spec.isa,
    )
    sampled = jax.tree.map(lambda leaf: leaf[..., :count], sampled)
    told = sampled._replace(token=jnp.where(lanes.is_last, sampled.token, -1))
    armed = _arm(rows, lanes, sampled.token, length)
    return updated, armed, told.packed(), told.top, streams[-1], *tapped(streams, form.taps)


def _merging(model: Decoder, lanes: Lanes, features: jax.Array, blank: int | None) -> Hidden:
    """`Decoder.hidden` with features of pictures where `Lanes.feature` says so, whatever the tokens are.

    blank: see `PrefillForm.blank_token`.
    """
    assert lanes.feature is not None
    row = lanes.feature.reshape(-1)

    def hidden(tokens: jax.Array, call: Call) -> Iterator[jax.Array]:
        x = model.embedded(tokens, call.products)
        found = features[jnp.maximum(row, 0)]
        seen, width = (row >= 0)[:, None], x.shape[1]
        x = jnp.where(seen, found[:, :width], x)
        more = [found[:, at : at + width] for at in range(width, found.shape[1], width)]
        tokens = tokens if blank is None else jnp.where(row >= 0, blank, tokens)
        return model.through(x, model.with_inputs(call, tokens, x), [(seen, each) for each in more])

    return hidden


def _grid_angles(rope: jax.Array, positions: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Cosines and sines `[K, P, T, 2, Dh/2]`, where angle i is of the position on axis `axes[i]`; `[P, T, 3]`."""
    each = rope[:, jnp.minimum(positions, rope.shape[1] - 1)]  # [K, P, T, 3, 2, Dh/2]
    axis = jnp.asarray(axes, jnp.int32)
    return jnp.where(axis == 0, each[:, :, :, 0], jnp.where(axis == 1, each[:, :, :, 1], each[:, :, :, 2]))


def through_layers(
    form: StepForm,
    hidden: Hidden,
    rope: jax.Array,
    cache: KVCache,
    fed: Fed,
    *,
    clears: bool = False,
    pending: dict[int, PendingInputs] | None = None,
) -> tuple[KVCache, list[jax.Array]]:
    """Feed tokens through all layers.

    clears (static): a lane may start a slot at position 0, so stale values there must be cleared.
    pending: receives, by store, the inputs of recurrent layers, whose state then does not change; None: it changes.
    Returns the cache, and the residual stream before each layer and after the last, f32 `[P * T, D]`.
    """
    spec, lanes, angles = form.spec, fed.lanes, fed.angles
    (slot, start, count), width = lanes, fed.tokens.shape[1]
    if angles is None:
        position = jnp.minimum(start[:, None] + jnp.arange(width, dtype=jnp.int32), rope.shape[1] - 1)
        angles = rope[:, position]  # [K, P, T, 2, Dh/2]
    fresh = (count > 0) & (start == 0) if clears else None
    updated: KVCache = [
        spec.attention.clear_values(store, slot, fresh)
        if fresh is not None and isinstance(store, LayerCache) and fed.block_tables is None
        else store
        for store in cache
    ]

    def attention(
        layer: LayerCache, projected: jax.Array, call: AttentionCall
    ) -> tuple[LayerCache, jax.Array]:
        return spec.attention.attend_prefill(layer, projected, call, lanes)

    recurrence = recurrent_prefill if pending is None else recurrent_verify
    attend = attending(
        form,
        updated,
        angles,
        attention,
        functools.partial(recurrence, lanes=lanes, native=spec.native_state),
        block_tables=fed.block_tables,
        reach=fed.reach,
        only_windows=fed.only_windows,
        pending=pending,
    )
    products = spec.products or ROWS_LEFT
    used = (jnp.arange(width, dtype=jnp.int32) < count[:, None]).reshape(-1)
    products = products.for_rows(used).with_adapters(fed.adapter)
    return updated, [*hidden(fed.tokens.reshape(-1), Call(attend, products, fed.read))]


def tapped(streams: Sequence[jax.Array], taps: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The residual streams before the layers `taps`, concatenated: one array `[N, taps * D]`, or none without taps."""
    return (jnp.concatenate([streams[tap] for tap in taps], axis=1),) if taps else ()


def _read(lanes: Lanes) -> jax.Array:
    """The rows whose residual stream is read after the last layer: bool `[P * T]`."""
    at = jnp.arange(lanes.tokens.shape[1], dtype=jnp.int32)
    ends = lanes.is_last[:, None] & (at == lanes.count[:, None] - 1)
    assert lanes.whole is not None
    return (ends | lanes.whole[:, None] & (at < lanes.count[:, None])).reshape(-1)


def behind_last(hidden: jax.Array, count: jax.Array) -> jax.Array:
    """The rows `[P, D]` of the residual stream `[P * T, D]` at the last of each lane's `count [P]` tokens."""
    lanes = len(count)
    return hidden[jnp.arange(lanes, dtype=jnp.int32) * (len(hidden) // lanes) + jnp.maximum(count - 1, 0)]


def _widen(count: int, rows: jax.Array) -> jax.Array:
    """Pad the leading axis with zeros up to `count`."""
    return jnp.pad(rows, ((0, count - rows.shape[0]), *((0, 0),) * (rows.ndim - 1)))


def _remember(rows: Rows, lanes: Lanes) -> Rows:
    """Write the lanes' tokens into the history of their slots."""
    offset = jnp.arange(lanes.tokens.shape[1], dtype=jnp.int32)
    slot, position = lanes.slot[:, None], lanes.start[:, None] + offset
    history = rows.remember(slot, position, lanes.tokens, offset < lanes.count[:, None])
    return dataclasses.replace(rows, history=history)


def _arm(rows: Rows, lanes: Lanes, token: jax.Array, length: jax.Array) -> Rows:
    """Activate the row of every lane that completed its prompt; other rows keep their state."""
    none = jnp.zeros_like(length)
    fresh = Rows(
        token=none,
        length=none,
        remaining=none,
        min_remaining=none,
        stop_ids=lanes.stop_ids,
        prompt_length=lanes.prompt_length,
        history=rows.history,
        sampling=lanes.sampling,
        adapter=lanes.adapter,
        rope_offset=lanes.rope_offset,
    )
    armed = advance(
        fresh,
        token=token,
        length=length,
        ended=ends(token, lanes.stop_ids),
        emitted=1,
        remaining=lanes.max_tokens,
        min_remaining=lanes.min_tokens,
    )
    return with_rows(rows, targets(lanes.slot, lanes.is_last, len(rows.token)), armed)
