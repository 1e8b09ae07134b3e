"""The sampler on XLA:CPU: one C++ call (`native/sampler.cc`) from logits to tokens and log-probabilities.

It shifts logits and chooses as the sampler in JAX does, by the same noise, but sums probabilities as whole numbers:
where a draw or the edge of a nucleus falls between two tokens to the last bit, the two may differ. It also spares XLA
most of what it compiles in a step: the sampler in JAX is four fifths of that (findings/061).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.graphs.row_state.packing import WORD, pack
from xla_engine.graphs.row_state.rows import SamplingRows
from xla_engine.graphs.sampling.logits import ByRow, Logits
from xla_engine.graphs.sampling.logits_processors import SamplingContext

SAMPLE, LOGPROBS = "xla_engine_sample", "xla_engine_logprobs"


def native_sample(
    logits: Logits,
    rows: SamplingRows,
    position: jax.Array,
    context: SamplingContext | None,
    *,
    processed_logprobs: bool,
    isa: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `graphs.sampling.sampler.sample` gives; zeros for rows not live. isa: whose library serves."""
    count, by_row = position.shape[0], isinstance(logits, ByRow)
    call = jax.ffi.ffi_call(
        f"{SAMPLE}_{isa}", (jax.ShapeDtypeStruct((count,), jnp.int32), *_logprobs_of(count))
    )
    none, no_words = jnp.zeros(0, jnp.int32), jnp.zeros(0, WORD)
    wide = [none, none, none, jnp.zeros(0, jnp.float32), no_words, no_words]
    if context is not None:
        tables = context.tables
        wide = [
            context.history,
            none if context.block_tables is None else context.block_tables,
            tables.bias_ids,
            tables.bias,
            tables.mask,
            no_words if context.draft is None or tables.draft_masks is None else tables.draft_masks,
        ]
    token, logprob, top = call(
        logits.values if isinstance(logits, ByRow) else logits,
        pack(_fields(rows, position, context)),
        *wide,
        processed=processed_logprobs,
        adjusts=context is not None,
        stops=np.int64(0 if context is None else context.stop_ids.shape[1]),
        by_row=by_row,
    )
    return token, logprob, top


def _fields(
    rows: SamplingRows, position: jax.Array, context: SamplingContext | None
) -> tuple[jax.Array, ...]:
    """What C++ knows of each row, in the order of `RowFields` (`native/adjust.h`), then its stop ids and breakers."""
    none = jnp.zeros_like(position)
    every = jnp.ones_like(position, bool)
    repetition = rows.repetition
    return (
        every if context is None else context.live,
        position,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.num_logprobs,
        *((none,) * 4 if context is None else _places(context)),
        none if context is None or context.draft is None else context.draft,
        rows.has_bias,
        rows.has_mask,
        rows.repetition_penalty,
        rows.frequency_penalty,
        rows.presence_penalty,
        *(
            (none, none, none, none - 1)
            if repetition is None
            else (repetition.multiplier, repetition.base, repetition.allowed_length, repetition.last_n)
        ),
        *(() if context is None else (context.stop_ids,)),
        *(() if repetition is None else (repetition.breakers,)),
    )


def _places(context: SamplingContext) -> tuple[jax.Array, ...]:
    return context.slot, context.length, context.prompt_length, context.min_remaining


def native_logprobs(
    logits: Logits, token: jax.Array, wanted: jax.Array, isa: str
) -> tuple[jax.Array, jax.Array]:
    """`graphs.sampling.logprobs.logprobs` in C++; a row that wants none has zeros."""
    call = jax.ffi.ffi_call(f"{LOGPROBS}_{isa}", _logprobs_of(token.shape[0]))
    by_row = isinstance(logits, ByRow)
    values = logits.values if isinstance(logits, ByRow) else logits
    logprob, top = call(values, token, wanted, by_row=by_row)
    return logprob, top


def _logprobs_of(count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((count,), jnp.float32),
        jax.ShapeDtypeStruct((1 + 2 * MAX_LOGPROBS, count), jnp.int32),
    )
