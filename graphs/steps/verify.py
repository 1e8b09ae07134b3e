"""The verify step: feeds each live row its last token and drafts of the next ones, and keeps the correct drafts.

Every position is sampled by the row's own sampler at (seed, position), and drafts are accepted as long as they equal
the sampled tokens. So a row emits the same tokens as in plain decode, whatever the drafts; these only decide how many
tokens a step emits. KV entries of rejected drafts lie beyond the row's length, where nothing reads them. Recurrent
layers update their state at the end of the step, when the number of accepted positions is known.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.kv_cache.cache import KVCache
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.recurrent.kind import RecurrentState
from xla_engine.graphs.recurrent.layer import PendingInputs, recurrent_commit
from xla_engine.graphs.row_state.rows import NOT_KEPT, Extents, Rows, some_rows, targets, with_rows
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.sampler import sample
from xla_engine.graphs.steps.advance import advance, ends
from xla_engine.graphs.steps.prefill import Fed, tapped, through_layers
from xla_engine.graphs.steps.step import StepForm, StepState

LOOKUP = (4, 3, 2)  # lengths of the row's ending that prompt lookup searches for, the longest wins


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The input of a verify call. Drafts come from the host if they fit, otherwise from the row's own earlier tokens.

    slot: i32 `[P]`, the row of each lane, distinct; -1 for an unused lane.
    most: i32 `[P]`, the most drafts the lane may use; 0 makes it a decode step of the row.
    tokens: i32 `[P, L]`, the tokens that the host expects from position `start` of the slot on, padded with -1.
    start: i32 `[P]`. The row may have more tokens than the host has read. They must equal the first of `tokens`; the
        others are the drafts.
    lookup: bool `[P]`, if the first of `tokens` differ from the row's, use prompt lookup: propose what followed an
        earlier occurrence of the row's ending.
    gated: bool `[P]`, the host has made masks for the drafts (`Tables.draft_masks`); otherwise the row's mask applies.
    """

    slot: jax.Array
    most: jax.Array
    tokens: jax.Array
    start: jax.Array
    lookup: jax.Array
    gated: jax.Array


def verify_step(
    form: StepForm, width: int, state: StepState, drafts: Drafts
) -> tuple[KVCache, Rows, jax.Array, jax.Array]:
    """Sample up to `width` tokens for each of P rows: one more than there are correct drafts.

    Static: `form`, its `key_length` at least each row's length + `width`, or its last position; `width`, W.
    Returns cache, rows, the packed samples `[2, P * W]` lane by lane (after a row's last token, NOT_KEPT for each
    rejected draft, then -1), and the most likely tokens as packed by `graphs.sampling.logprobs.logprobs`.
    """
    rows = state.rows.with_tables(state.tables)
    return verify_rows(form, width, state._replace(rows=rows), drafts)[:4]


class Members(NamedTuple):
    """The rows of a verify call: their slots, whether they are live, and the most drafts they may have; each `[P]`."""

    slot: jax.Array
    live: jax.Array
    limit: jax.Array


def members(rows: Rows, drafts: Drafts, width: int) -> Members:
    """The rows of a verify call."""
    slot = jnp.maximum(drafts.slot, 0)
    remaining = rows.remaining[slot]
    live = (drafts.slot >= 0) & (remaining > 0)
    return Members(slot, live, jnp.clip(jnp.minimum(drafts.most, remaining - 1), 0, width - 1))


def verify_rows(
    form: StepForm, width: int, state: StepState, drafts: Drafts, *, taps: tuple[int, ...] = ()
) -> tuple[KVCache, Rows, jax.Array, jax.Array, jax.Array]:
    """`verify_step` for rows whose block tables are already updated.

    Also returns the residual stream before the layers `taps` (static), concatenated `[P * W, taps * D]`, or without
    taps after the last layer `[P * W, D]`.
    """
    spec, (weights, rope, _, rows, tables) = form.spec, state
    lanes = drafts.slot.shape[0]
    slot, live, limit = members(rows, drafts, width)
    own = some_rows(rows, slot)
    length = own.length
    draft, count = jnp.zeros((lanes, 0), jnp.int32), jnp.zeros(lanes, jnp.int32)  # [P, W - 1], [P]
    if width > 1:
        draft, count = _drafts(rows, drafts, slot, live, limit, width - 1)

    tokens = jnp.concatenate([own.token[:, None], jnp.maximum(draft, 0)], axis=1)  # [P, W]
    fed = jnp.where(live, count + 1, 0)
    place = jnp.arange(width, dtype=jnp.int32)
    used = place < fed[:, None]  # [P, W]
    model, products = spec.merge(weights), spec.products or ROWS_LEFT
    pending: dict[int, PendingInputs] | None = {} if width > 1 else None  # with width 1, every token is kept
    angles = None
    if own.rope_offset is not None:
        turned = (length + own.rope_offset)[:, None] + place
        angles = rope[:, jnp.minimum(turned, rope.shape[1] - 1)]  # [K, P, W, 2, Dh/2]
    given = Fed(tokens, Extents(slot, length, fed), rows.block_tables, adapter=own.adapter, angles=angles)
    updated, streams = through_layers(form, model.hidden, rope, state.cache, given, pending=pending)
    logits = model.logits(streams[-1], products.for_rows(used.reshape(-1)))  # of P * W rows
    position = length[:, None] + place  # of the fed tokens, [P, W]
    rows = replace(rows, history=rows.remember(slot[:, None], position, tokens, used))

    def spread(lane: jax.Array) -> jax.Array:
        return jnp.repeat(lane, width, axis=0)

    context = SamplingContext(
        live=used.reshape(-1),
        slot=spread(slot),
        length=(position + 1).reshape(-1),
        prompt_length=spread(own.prompt_length),
        min_remaining=(own.min_remaining[:, None] - place).reshape(-1),
        stop_ids=spread(own.stop_ids),
        history=rows.history,
        tables=tables,
        block_tables=rows.block_tables,
        draft=jnp.where(drafts.gated[:, None], place, 0).reshape(-1) if width > 1 else None,
    )
    sampling = jax.tree.map(spread, own.sampling)
    sampled = sample(
        logits,
        sampling,
        context.length,
        context,
        processed_logprobs=form.processed_logprobs,
        native=spec.isa,
    )

    token = sampled.token.reshape(lanes, width)
    right = (token[:, :-1] == draft) & (place[:-1] < count[:, None])  # [P, W - 1]
    last = ends(token, own.stop_ids[:, None])
    # A token is emitted if every draft before it is correct and no token before it ends the row.
    goes_on = jnp.cumprod((right & ~last[:, :-1]).astype(jnp.int32), axis=1)
    emitted = jnp.where(live, 1 + jnp.sum(goes_on, axis=1), 0)
    for store, brought in (pending or {}).items():
        layer, recurrent = updated[store], spec.local.recurrent
        assert isinstance(layer, RecurrentState) and recurrent is not None
        updated[store] = recurrent_commit(
            recurrent, layer, brought, slot=slot, count=emitted, native=spec.native_state
        )
    final = jnp.maximum(emitted - 1, 0)[:, None]
    advanced = advance(
        own,
        token=jnp.take_along_axis(token, final, axis=1)[:, 0],
        length=length + emitted,
        ended=jnp.take_along_axis(last, final, axis=1)[:, 0],
        emitted=emitted,
        remaining=own.remaining,
        min_remaining=own.min_remaining,
    )
    advanced = with_rows(rows, targets(slot, live, len(rows.token)), advanced)
    rejected = jnp.where(used, NOT_KEPT, -1)
    told = sampled._replace(token=jnp.where(place < emitted[:, None], token, rejected).reshape(-1))
    return updated, advanced, told.packed(), told.top, next(iter(tapped(streams, taps)), streams[-1])


def _drafts(
    rows: Rows, drafts: Drafts, slot: jax.Array, live: jax.Array, limit: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Each lane's drafts i32 `[P, most]`, padded with -1, and their number `[P]`, at most `limit [P]`."""
    end = rows.length[slot]  # the position of the row's last token, which is not in the history yet

    def look() -> jax.Array:
        known = known_tokens(rows, slot)
        given, fits = continued(known, end, drafts, most)
        looks = drafts.lookup & ~fits

        def better() -> jax.Array:
            found = looked_up(known, end, most)
            return jnp.where((looks & (found[:, 0] >= 0))[:, None], found, given)

        return lax.cond(jnp.any(live & looks), better, lambda: given)

    none = jnp.full((len(slot), most), -1, jnp.int32)
    asked = live & (limit > 0) & (drafts.lookup | (drafts.tokens[:, 0] >= 0))
    draft = lax.cond(jnp.any(asked), look, lambda: none)
    usable = (draft >= 0) & (jnp.arange(most, dtype=jnp.int32) < limit[:, None])
    count = jnp.sum(jnp.cumprod(usable.astype(jnp.int32), axis=1), axis=1)
    return jnp.where(jnp.arange(most, dtype=jnp.int32) < count[:, None], draft, -1), count


def continued(known: jax.Array, end: jax.Array, drafts: Drafts, most: int) -> tuple[jax.Array, jax.Array]:
    """The host's tokens for the positions after `end [P]`, i32 `[P, most]`, padded with -1, and whether its earlier
    tokens equal the row's, bool `[P]`. Even if one differs, the later ones may still be correct."""
    offset = end + 1 - drafts.start  # how many of the host's tokens the row should have by now
    given = drafts.tokens.shape[1]
    place = jnp.arange(given, dtype=jnp.int32)
    there = jnp.clip(drafts.start[:, None] + place, 0, known.shape[1] - 1)
    same = jnp.take_along_axis(known, there, axis=1) == drafts.tokens
    fits = (offset >= 0) & (offset < given) & jnp.all(same | (place >= offset[:, None]), axis=1)
    at = offset[:, None] + jnp.arange(most, dtype=jnp.int32)
    rest = jnp.take_along_axis(drafts.tokens, jnp.clip(at, 0, given - 1), axis=1)
    rest = jnp.where((at >= 0) & (at < given), rest, -1)
    return rest, fits & (rest[:, 0] >= 0)


def looked_up(known: jax.Array, end: jax.Array, most: int) -> jax.Array:
    """Prompt lookup: what followed the last earlier occurrence of a row's ending, i32 `[P, most]`; -1 if none.

    known: i32 `[P, S]`, valid up to `end [P]`. A continuation that reaches the end wraps around, which extends text
    that repeats itself.
    """
    positions = known.shape[1]
    place = jnp.arange(positions, dtype=jnp.int32)
    alike = jnp.ones(known.shape, bool)
    found = jnp.full(end.shape, -1, jnp.int32)  # the last position of the earlier occurrence
    for back in range(max(LOOKUP)):
        own = jnp.take_along_axis(known, jnp.maximum(end - back, 0)[:, None], axis=1)
        earlier = jnp.pad(known, ((0, 0), (back, 0)), constant_values=-1)[:, :positions]
        alike &= (earlier == own) & (place >= back) & (place < end[:, None])
        if back + 1 in LOOKUP:
            at = jnp.max(jnp.where(alike, place, -1), axis=1)
            found = jnp.where(at >= 0, at, found)
    period = jnp.maximum(end - found, 1)
    at = found[:, None] + 1 + jnp.arange(most, dtype=jnp.int32) % period[:, None]
    tokens = jnp.take_along_axis(known, jnp.clip(at, 0, positions - 1), axis=1)
    return jnp.where(found[:, None] >= 0, tokens, -1)


def known_tokens(rows: Rows, slot: jax.Array) -> jax.Array:
    """The tokens of slots by position, including the last one, i32 `[P, S]`; later positions are arbitrary."""
    if rows.block_tables is None:
        known = rows.history[slot]
    else:
        known = rows.history.at[rows.block_tables[slot]].get(mode="clip").reshape(len(slot), -1)
    return jnp.where(
        jnp.arange(known.shape[1]) == rows.length[slot][:, None], rows.token[slot][:, None], known
    )
