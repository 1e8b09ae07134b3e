"""The ragged decode step: one token for every live row of B_max rows, in one program; inactive rows are masked."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from xla_engine.graphs.kv_cache.cache import KVCache
from xla_engine.graphs.linear.products import WEIGHT_LEFT
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.recurrent.layer import recurrent_decode
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.graphs.sampling.logits_processors import SamplingContext
from xla_engine.graphs.sampling.sampler import sample
from xla_engine.graphs.steps.advance import advance, ends
from xla_engine.graphs.steps.step import StepForm, StepState, attending
from xla_engine.graphs.steps.verify import Drafts, verify_step


def decode_step(
    form: StepForm, state: StepState, scheduled: jax.Array
) -> tuple[KVCache, Rows, jax.Array, jax.Array]:
    """Feed each live row its last token and sample the next one.

    form (static): its `key_length` must exceed every live row's length. scheduled: bool `[B]`, the rows in the plan. A
    row is live if it is scheduled and has tokens left to sample; other rows write nothing and keep their state.
    Returns cache, rows, the packed samples `[2, B]` (token -1 for rows that are not live), and the most likely tokens
    as packed by `graphs.sampling.logprobs.logprobs`.
    """
    spec, rows = form.spec, state.rows.with_tables(state.tables)
    live = scheduled & (rows.remaining > 0)
    model = spec.merge(state.weights)
    position = rows.length if rows.rope_offset is None else rows.length + rows.rope_offset
    angles = state.rope[:, position]  # [K, B, 2, Dh/2]
    updated = list(state.cache)

    recurrence = functools.partial(recurrent_decode, live=live, native=spec.native_state)
    attention = functools.partial(spec.attention.attend_decode, length=rows.length, live=live)
    attend = attending(form, updated, angles, attention, recurrence, block_tables=rows.block_tables)
    products = (spec.products or WEIGHT_LEFT).for_rows(live)
    *_, hidden = model.hidden(rows.token, Call(attend, products.with_adapters(rows.adapter)))
    logits = model.logits(hidden, products)
    every = jnp.arange(live.shape[0], dtype=jnp.int32)
    rows = replace(rows, history=rows.remember(every, rows.length, rows.token, live))
    context = SamplingContext(
        live=live,
        slot=every,
        length=rows.length + 1,
        prompt_length=rows.prompt_length,
        min_remaining=rows.min_remaining,
        stop_ids=rows.stop_ids,
        history=rows.history,
        tables=state.tables,
        block_tables=rows.block_tables,
    )
    sampled = sample(
        logits,
        rows.sampling,
        context.length,
        context,
        processed_logprobs=form.processed_logprobs,
        native=spec.isa,
    )
    advanced = advance(
        rows,
        token=sampled.token,
        length=context.length,
        ended=ends(sampled.token, rows.stop_ids),
        emitted=1,
        remaining=rows.remaining,
        min_remaining=rows.min_remaining,
    )
    advanced = jax.tree.map(lambda new, old: old if new is old else jnp.where(live, new, old), advanced, rows)
    told = sampled._replace(token=jnp.where(live, sampled.token, -1))
    return updated, advanced, told.packed(), told.top


def decode_few_rows(
    form: StepForm, state: StepState, slots: jax.Array
) -> tuple[KVCache, Rows, jax.Array, jax.Array]:
    """`decode_step` for only the rows in `slots i32 [W]`, distinct or -1 for none: a verify step without drafts.

    The results have columns for all B rows, as those of `decode_step`. The bits are the same only if a row's bits do
    not depend on the number of rows and prefill gives the bits of decode.
    """
    total, width = state.rows.token.shape[0], slots.shape[0]
    none = jnp.zeros(width, jnp.int32)
    alone = Drafts(
        slot=slots, most=none, tokens=none[:, None] - 1, start=none, lookup=none > 0, gated=none > 0
    )
    cache, rows, samples, top = verify_step(form, 1, state, alone)

    def in_columns(found: jax.Array, missing: int) -> jax.Array:
        every = jnp.full((len(found), total), missing, found.dtype)
        return every.at[:, jnp.where(slots < 0, total, slots)].set(found, mode="drop")

    return cache, rows, in_columns(samples, -1), in_columns(top, 0)
