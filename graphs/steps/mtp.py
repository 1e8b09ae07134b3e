"""The verify step with a layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next).

The layer takes what the model made of position p and the token at p + 1, and guesses the one at p + 2; for further
guesses it takes what it made itself. It shares embedding and output head with the model, and has keys and values of
its own, by slot. What the model makes of positions is handed on from prefill and verify steps. A plain decode step
hands on nothing: the layer goes without these positions, and has no guess before the next verify step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.linear.products import ROWS_LEFT, Products
from xla_engine.graphs.model.decoder import Attend, Decoder, ModelSpec
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.row_state.lanes import Extents, put, targets
from xla_engine.graphs.row_state.rows import Rows, Tables
from xla_engine.graphs.steps.guess import asks, draw, proposed
from xla_engine.graphs.steps.prefill import Lanes, behind_last, through_layers
from xla_engine.graphs.steps.verify import Drafts, known_tokens, members, verify_rows


class MtpWeights(NamedTuple):
    """join: `[D, 2 D]`, of token and hidden state side by side, as products read it. token_norm, hidden_norm: `[D]`.
    decoder: leaves of a decoder of one layer, which has the model's embedding and head."""

    join: jax.Array
    token_norm: jax.Array
    hidden_norm: jax.Array
    decoder: list[jax.Array]


class MtpState(NamedTuple):
    """cache: the layer's, of every slot. hidden: f32 `[B, W, D]`, what the model made, behind its last norm, of the
    positions from `begin [B]` on; as many count as the row has got further since."""

    cache: KVCache
    hidden: jax.Array
    begin: jax.Array


def make_mtp_state(spec: ModelSpec, rows: int, length: int, width: int) -> MtpState:
    """State of `rows` slots of `length` positions, whole spans, for verify steps of up to `width` tokens."""
    hidden = jnp.zeros((rows, width, spec.config.hidden_size), jnp.float32)
    return MtpState(make_cache(spec, rows, length), hidden, jnp.full(rows, -1, jnp.int32))


class _Joined:
    """The layer over `hidden f32 [N, D]`, as `through_layers` takes a model."""

    def __init__(self, layer: Decoder, weights: MtpWeights, hidden: jax.Array) -> None:
        self._layer, self._weights, self._hidden = layer, weights, hidden

    def hidden(self, tokens: jax.Array, attend: Attend, products: Products) -> jax.Array:
        eps = self._layer.config.rms_norm_eps
        token = rms_norm(self._layer.embedded(tokens, products), self._weights.token_norm, eps)
        before = rms_norm(self._hidden, self._weights.hidden_norm, eps)
        x = products.linear(self._weights.join, jnp.concatenate([token, before], axis=1))
        return self._layer.through(x, attend, products)


def mtp_and_verify(
    mtp: ModelSpec,
    spec: ModelSpec,
    key_length: int,
    width: int,
    weights: list[jax.Array],
    rope: jax.Array,
    cache: KVCache,
    rows: Rows,
    drafts: Drafts,
    tables: Tables,
    own: MtpWeights,
    own_rope: jax.Array,
    state: MtpState,
    *,
    processed_logprobs: bool = False,
) -> tuple[KVCache, Rows, jax.Array, jax.Array, MtpState]:
    """`verify_step`, where rows that may look up are guessed for by the layer `mtp` (static) instead.

    Returns what `verify_step` does, and the layer's state.
    """
    rows = rows.with_tables(tables)
    at = members(rows, drafts, width)
    slot, end = at.slot, rows.length[at.slot]
    lanes, held = len(slot), state.hidden.shape[1]
    layer, products = mtp.merge(own.decoder), mtp.products or ROWS_LEFT
    slots = replace(rows, block_tables=None)  # the layer's slots borrow no blocks

    begin = jnp.maximum(state.begin[slot], 0)
    count = end - state.begin[slot]  # positions that the layer has not got, each with the token behind it
    wanted = asks(rows, drafts, at, width - 1) & (state.begin[slot] >= 0) & (count >= 1) & (count <= held)
    known = known_tokens(rows, slot)
    there = begin[:, None] + 1 + jnp.arange(held, dtype=jnp.int32)
    tokens = jnp.take_along_axis(known, jnp.minimum(there, known.shape[1] - 1), axis=1)

    def feed(
        cache: KVCache, hidden: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Feed lanes `[P, T]` with `hidden f32 [P T, D]`; returns also what becomes of each one's last `[P, D]`."""
        joined = _Joined(layer, own, hidden)
        fed = Extents(slot, start, count)
        cache, x = through_layers(mtp, key_length, joined, own_rope, cache, slots, tokens, fed)
        return cache, behind_last(x, count)

    def one(
        held: tuple[KVCache, jax.Array], token: jax.Array, position: jax.Array, going: jax.Array
    ) -> tuple[tuple[KVCache, jax.Array], jax.Array]:
        own_cache, x = held
        fed = going.astype(jnp.int32)
        own_cache, x = feed(own_cache, layer.normed(x), token[:, None], position - 1, fed)
        return (own_cache, x), layer.logits(x, products.for_rows(going))

    flat = state.hidden[slot].reshape(lanes * held, -1)
    own_cache, x = feed(state.cache, flat, tokens, begin, jnp.where(wanted, count, 0))
    logits = layer.logits(x, products.for_rows(wanted))
    (own_cache, _), guesses = draw(rows, tables, at, wanted, width - 1, (own_cache, x), logits, one)
    drafts = proposed(rows, drafts, at, wanted, guesses)
    cache, rows, packed, top, hidden = verify_rows(
        spec, key_length, width, weights, rope, cache, rows, drafts, tables, processed=processed_logprobs
    )
    made = spec.merge(weights).normed(hidden).reshape(lanes, width, -1)
    target = targets(slot, at.live, len(state.begin))
    kept = state.hidden.at[target, :width].set(made, mode="drop", unique_indices=True)
    return cache, rows, packed, top, MtpState(own_cache, kept, put(state.begin, target, end))


def read_prompts(
    mtp: ModelSpec,
    spec: ModelSpec,
    key_length: int,
    weights: list[jax.Array],
    hidden: jax.Array,
    lanes: Lanes,
    rows: Rows,
    own: MtpWeights,
    own_rope: jax.Array,
    state: MtpState,
) -> MtpState:
    """Feed the layer what a prefill call made of its lanes, `hidden f32 [P * T, D]`; rows: any, for their kind."""
    slot, start, count = lanes.slot, lanes.start, lanes.count
    number, width = lanes.tokens.shape
    made = spec.merge(weights).normed(hidden).reshape(number, width, -1)
    final = made[jnp.arange(number), jnp.maximum(count - 1, 0)]  # [P, D]
    # A lane may go on where the one before it ended; else the slot knows what came before.
    follows = (jnp.roll(slot, 1) == slot) & (jnp.roll(start + count, 1) == start) & (jnp.arange(number) > 0)
    before = jnp.where(follows[:, None], jnp.roll(final, 1, axis=0), state.hidden[slot, 0])
    fresh = start == 0
    shifted = jnp.concatenate([before[:, None], made[:, :-1]], axis=1)
    given = jnp.where(fresh[:, None, None], made, shifted)
    tokens = jnp.where(fresh[:, None], jnp.roll(lanes.tokens, -1, axis=1), lanes.tokens)
    fed = jnp.maximum(count - fresh, 0)
    joined = _Joined(mtp.merge(own.decoder), own, given.reshape(number * width, -1))
    slots = replace(rows, block_tables=None)
    at = Extents(slot, jnp.maximum(start - 1, 0), fed)
    cache, _ = through_layers(mtp, key_length, joined, own_rope, state.cache, slots, tokens, at)
    goes_on = jnp.concatenate([follows[1:], jnp.zeros(1, bool)])
    target = targets(slot, (count > 0) & ~goes_on, len(state.begin))
    return MtpState(
        cache,
        state.hidden.at[target, 0].set(final, mode="drop", unique_indices=True),
        put(state.begin, target, start + count - 1),
    )
