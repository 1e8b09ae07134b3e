"""The sampler on XLA:CPU: one C++ call (`native/sampler.cc`) from logits to tokens and log-probabilities.

It chooses as the sampler in JAX does, by the same noise, but sums probabilities as whole numbers: where a draw or the
edge of a nucleus falls between two tokens to the last bit, the two may differ. It also spares XLA most of what it
compiles in a step: the sampler in JAX is four fifths of that (findings/061).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.graphs.row_state.rows import SamplingRows

SAMPLE, LOGPROBS = "xla_engine_sample", "xla_engine_logprobs"


def native_sample(
    logits: jax.Array,
    adjusted: jax.Array,
    rows: SamplingRows,
    position: jax.Array,
    live: jax.Array,
    *,
    processed_logprobs: bool,
    isa: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `graphs.sampling.sampler.sample` gives, once requests' adjustments are made; zeros for rows not live.

    logits, adjusted: float32 `[V, N]`, as they came and with adjustments; one array where no row has any. isa: the
    instruction set whose library serves.
    """
    count = position.shape[0]
    call = jax.ffi.ffi_call(
        f"{SAMPLE}_{isa}", (jax.ShapeDtypeStruct((count,), jnp.int32), *_logprobs_of(count))
    )
    token, logprob, top = call(
        logits,
        adjusted,
        live,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        position,
        rows.num_logprobs,
        processed=processed_logprobs,
    )
    return token, logprob, top


def native_logprobs(
    logits: jax.Array, token: jax.Array, wanted: jax.Array, isa: str
) -> tuple[jax.Array, jax.Array]:
    """`graphs.sampling.logprobs.logprobs` in C++; a row that wants none has zeros."""
    logprob, top = jax.ffi.ffi_call(f"{LOGPROBS}_{isa}", _logprobs_of(token.shape[0]))(logits, token, wanted)
    return logprob, top


def _logprobs_of(count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((count,), jnp.float32),
        jax.ShapeDtypeStruct((1 + 2 * MAX_LOGPROBS, count), jnp.int32),
    )
