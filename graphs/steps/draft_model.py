"""The verify step with a draft model: a smaller decoder with the same vocabulary drafts, then the model verifies.

The draft model has its own KV cache, by slot, and remembers which tokens it was fed. The entries are valid as far as
these tokens agree with the row's; the others are fed again. So the host need not report rejected drafts, plain decode
steps, new owners of a slot or parked requests. Wrong entries could only cost time: drafts change no bit.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.kv_cache.cache import KVCache, make_cache
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import Extents, Rows, put, targets
from xla_engine.graphs.sampling.logits import Logits
from xla_engine.graphs.steps.draft_sampling import asks, draw, proposed
from xla_engine.graphs.steps.prefill import Fed, behind_last, through_layers
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.graphs.steps.verify import Drafts, Members, known_tokens, members, verify_rows

FED = 16  # tokens of a row that one catch-up round feeds
ROUNDS = 32  # the most rounds of a step; a row that is further behind gets no drafts yet


class DraftState(NamedTuple):
    """cache: the draft model's KV cache. tokens: i32 `[B, S]`, the tokens whose keys and values it holds, else -1."""

    cache: KVCache
    tokens: jax.Array


# (number of the round, state, next position of each lane, tokens it is behind, hidden state of its last token)
_Round = tuple[jax.Array, DraftState, jax.Array, jax.Array, jax.Array]


def make_draft_state(spec: ModelSpec, rows: int, length: int) -> DraftState:
    """The empty state for `rows` slots of `length` positions, a multiple of the span."""
    return DraftState(make_cache(spec, rows, length), jnp.full((rows, length), -1, jnp.int32))


class DraftForm(NamedTuple):
    """The static part of drafting with a model.

    spec: of the draft model. reach: how many of the latest positions its cache keeps; None: all.
    """

    spec: ModelSpec
    reach: int | None


def draft_and_verify(
    draft: DraftForm,
    form: StepForm,
    width: int,
    state: StepState,
    drafts: Drafts,
    weights: list[jax.Array],
    rope: jax.Array,
    own: DraftState,
) -> tuple[KVCache, Rows, jax.Array, jax.Array, DraftState]:
    """`verify_step`, but for rows that may look up drafts, the model of `draft` (static) drafts instead.

    weights, rope, own: the draft model's, and its state. Also returns the draft model's state.
    """
    rows = state.rows.with_tables(state.tables)
    at = members(rows, drafts, width)
    wanted = asks(rows, drafts, at, width - 1)
    its = StepState(weights, rope, own.cache, rows, state.tables)
    own, tokens = _draft(
        StepForm(draft.spec, form.key_length), draft.reach, width - 1, its, own.tokens, at, wanted
    )
    drafts = proposed(rows, drafts, at, wanted, tokens)
    cache, rows, packed, top, _ = verify_rows(form, width, state._replace(rows=rows), drafts)
    return cache, rows, packed, top, own


def _draft(
    form: StepForm,
    reach: int | None,
    most: int,
    own: StepState,
    tokens: jax.Array,
    at: Members,
    wanted: jax.Array,
) -> tuple[DraftState, jax.Array]:
    """Feed the draft model the tokens it lacks of the rows `wanted [P]`, then draft up to `most` tokens for each.

    own: weights, rotary tables and cache of the draft model, and the rows. tokens: as in `DraftState`.
    """
    spec, rows = form.spec, own.rows
    slot, end = at.slot, rows.length[at.slot]
    known, cached = known_tokens(rows, slot), tokens[slot]
    lanes, positions = len(slot), min(known.shape[1], cached.shape[1])
    known = known[:, :positions]
    place = jnp.arange(positions, dtype=jnp.int32)
    holds = (cached[:, :positions] == known) & (place < end[:, None])  # the last token is always fed
    begin = jnp.min(jnp.where(holds, positions, place), axis=1)
    if reach is not None:
        newest = jnp.max(jnp.where(cached >= 0, jnp.arange(cached.shape[1], dtype=jnp.int32) + 1, 0), axis=1)
        begin = jnp.where(newest - begin > reach, 0, begin)
    # Entries from `begin` on were computed from other tokens.
    target = targets(slot, wanted, len(tokens))
    tokens = put(tokens, target, jnp.where(jnp.arange(cached.shape[1]) < begin[:, None], cached, -1))

    model, products = spec.merge(own.weights), spec.products or ROWS_LEFT

    def feed(
        state: DraftState, fed: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[DraftState, jax.Array]:
        """Feed lanes `[P, T]`; also returns the residual stream at each lane's last token `[P, D]`."""
        given = Fed(fed, Extents(slot, start, count))  # the draft model's cache has no block pool
        cache, streams = through_layers(form, model.hidden, own.rope, state.cache, given)
        offset = jnp.arange(fed.shape[1], dtype=jnp.int32)
        record = replace(rows, block_tables=None, history=state.tokens)
        tokens = record.remember(slot[:, None], start[:, None] + offset, fed, offset < count[:, None])
        return DraftState(cache, tokens), behind_last(streams[-1], count)

    def is_behind(carry: _Round) -> jax.Array:
        number, _, _, behind, _ = carry
        return (number < ROUNDS) & jnp.any(behind > 0)

    def catch_up(carry: _Round) -> _Round:
        number, state, begin, behind, hidden = carry
        count = jnp.minimum(behind, FED)
        there = jnp.minimum(begin[:, None] + jnp.arange(FED, dtype=jnp.int32), positions - 1)
        state, last = feed(state, jnp.take_along_axis(known, there, axis=1), begin, count)
        hidden = jnp.where((count > 0)[:, None], last, hidden)
        return number + 1, state, begin + count, behind - count, hidden

    behind = jnp.where(wanted, end + 1 - begin, 0)
    hidden = jnp.zeros((lanes, spec.config.hidden_size), jnp.float32)
    first = (jnp.int32(0), DraftState(own.cache, tokens), begin, behind, hidden)
    _, state, _, behind, hidden = lax.while_loop(is_behind, catch_up, first)

    def one(
        state: DraftState, token: jax.Array, position: jax.Array, going: jax.Array
    ) -> tuple[DraftState, Logits]:
        state, hidden = feed(state, token[:, None], position, going.astype(jnp.int32))
        return state, model.logits(hidden, products.for_rows(going))

    ready = wanted & (behind == 0)
    logits = model.logits(hidden, products.for_rows(ready))
    return draw(rows, own.tables, at, ready, most, state, logits, one, native=spec.isa)
