"""Sampling drafts on the device, with the same noise with which the row itself will sample.

A draft is sampled by the row's own sampler at (seed, position), from the logits of a cheaper model. Since both use the
same uniform number, a draft is accepted as often as both distributions map that number to the same token, at any
temperature.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.row_state.rows import Rows, Tables
from xla_engine.graphs.sampling.logits import Logits
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.sampler import sample
from xla_engine.graphs.steps.verify import Drafts, Members, continued, known_tokens

Drafter = TypeVar("Drafter")
# (state, tokens [P], their positions [P], which are wanted [P]) -> (new state, logits of the next tokens)
Feed = Callable[[Drafter, jax.Array, jax.Array, jax.Array], tuple[Drafter, Logits]]


def asks(rows: Rows, drafts: Drafts, at: Members, most: int) -> jax.Array:
    """The rows that need drafts from the device, bool `[P]`: they allow it, and the host's drafts do not fit."""
    _, fits = continued(known_tokens(rows, at.slot), rows.length[at.slot], drafts, most)
    return at.live & (at.limit > 0) & drafts.lookup & ~fits


def draw(
    rows: Rows,
    tables: Tables,
    at: Members,
    wanted: jax.Array,
    most: int,
    drafter: Drafter,
    logits: Logits,
    feed: Feed[Drafter],
    *,
    native: str | None,
) -> tuple[Drafter, jax.Array]:
    """Draft up to `most` tokens for each row that is `wanted [P]`: i32 `[P, most]`, padded with -1.

    logits: of the first drafts. feed: feeds drafted tokens, and returns the logits of the next ones.
    native: as in `sample`.
    """
    slot, _, limit = at
    end = rows.length[slot]
    history = rows.remember(slot, end, rows.token[slot], wanted)
    sampling = jax.tree.map(lambda leaf: leaf[slot], rows.sampling)

    def one(state: Any, place: jax.Array) -> tuple[Any, jax.Array]:
        drafter, history, logits = state
        live, position = wanted & (place < limit), end + 1 + place
        known = replace(rows, history=history)
        context = SamplingContext(
            live=live,
            slot=slot,
            length=position,
            prompt_length=rows.prompt_length[slot],
            min_remaining=rows.min_remaining[slot] - place,
            stop_ids=rows.stop_ids[slot],
            history=history,
            tables=tables,
            block_tables=rows.block_tables,
        )
        token = sample(logits, sampling, position, context, native=native).token
        going = live & (place + 1 < limit)
        history = known.remember(slot, position, token, going)
        drafter, logits = feed(drafter, jnp.maximum(token, 0), position, going)
        return (drafter, history, logits), jnp.where(live, token, -1)

    first: Any = drafter, history, logits
    (last, *_), tokens = lax.scan(one, first, jnp.arange(most, dtype=jnp.int32))
    return last, tokens.T


def proposed(rows: Rows, drafts: Drafts, at: Members, wanted: jax.Array, tokens: jax.Array) -> Drafts:
    """`drafts` with `tokens [P, most]` in place of the host's for `wanted [P]` rows, and without lookup."""
    padded = jnp.full_like(drafts.tokens, -1).at[:, : tokens.shape[1]].set(tokens)
    return replace(
        drafts,
        tokens=jnp.where(wanted[:, None], padded, drafts.tokens),
        start=jnp.where(wanted, rows.length[at.slot] + 1, drafts.start),
        lookup=jnp.zeros_like(drafts.lookup),
    )
