"""The C++ sampler (`native/sampler.cc`) for XLA:CPU: one call from logits to tokens and log-probabilities.

It does the same as the sampler in JAX, with the same noise, but sums probabilities as integers. So the two may differ
if a draw, or the edge of a nucleus, falls between two tokens to the last bit. It also saves compile time: the sampler
in JAX is four fifths of what XLA compiles for a step (findings/sampler.md).
"""

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.row_state.rows import WORD, pack
from xla_engine.graphs.row_state.sampling_fields import (
    REPETITION_FIELDS,
    SAMPLING_FIELDS,
    RowField,
    SamplingRows,
)
from xla_engine.graphs.sampling.logits import ByRow, Logits, Sampled, shapes
from xla_engine.graphs.sampling.logits_processors import SamplingContext

SAMPLE, PROCESS, LOGPROBS = "xla_engine_sample", "xla_engine_process", "xla_engine_logprobs"

# The fields of `SamplingContext` that C++ gets for each row, in addition to the sampling table.
_PLACES: dict[str, type[np.generic]] = {
    "live": np.bool_,
    "slot": np.int32,
    "length": np.int32,
    "prompt_length": np.int32,
    "min_remaining": np.int32,
    "draft": np.int32,
}
_CPP_TYPES = {np.bool_: "uint32_t", np.uint32: "uint32_t", np.int32: "int32_t", np.float32: "float"}
_HEADER = """// Generated from the sampling table by `python -m xla_engine.graphs.sampling.native`. Do not edit.

#pragma once

#include <cstdint>

namespace xla_engine {

// One row as graphs/sampling/native.py packs it; behind it are its stop ids and its sequence breakers, padded with -1.
struct RowFields {
%s};

}  // namespace xla_engine
"""


def native_sample(
    logits: Logits,
    rows: SamplingRows,
    position: jax.Array,
    context: SamplingContext | None,
    *,
    processed_logprobs: bool,
    isa: str,
) -> Sampled:
    """As `graphs.sampling.sampler.sample`; rows that are not live get zeros. isa: selects the library."""
    call = jax.ffi.ffi_call(f"{SAMPLE}_{isa}", tuple(shapes(position.shape[0])))
    found = call(
        *_inputs(logits, rows, position, context),
        processed=processed_logprobs,
        adjusts=context is not None,
        stops=np.int64(0 if context is None else context.stop_ids.shape[1]),
        by_row=isinstance(logits, ByRow),
    )
    return Sampled(*found)


def native_processed(logits: Logits, rows: SamplingRows, context: SamplingContext, isa: str) -> ByRow:
    """The logits whose log-probabilities are the processed ones: -inf for tokens that cannot be sampled.

    Rows that are not live get zeros.
    """
    count, values = context.live.shape[0], logits.values if isinstance(logits, ByRow) else logits
    shape = jax.ShapeDtypeStruct((count, values.shape[isinstance(logits, ByRow)]), jnp.float32)
    call = jax.ffi.ffi_call(f"{PROCESS}_{isa}", shape)
    given = _inputs(logits, rows, jnp.zeros(count, jnp.int32), context)
    return ByRow(call(*given, stops=np.int64(context.stop_ids.shape[1]), by_row=isinstance(logits, ByRow)))


def _inputs(
    logits: Logits, rows: SamplingRows, position: jax.Array, context: SamplingContext | None
) -> list[jax.Array]:
    """Logits, rows, and the tables of all slots, which are empty without a context."""
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
    values = logits.values if isinstance(logits, ByRow) else logits
    return [values, _words(rows, position, context), *wide]


def _words(rows: SamplingRows, position: jax.Array, context: SamplingContext | None) -> jax.Array:
    """The C++ input for each row, u32 `[N, W]`: `RowFields` (`native/row_fields.h`), stop ids, sequence breakers."""
    none = jnp.zeros_like(position)
    if context is None:
        places = [jnp.ones_like(position, bool), *[none] * (len(_PLACES) - 1)]
    else:
        places = [none if (found := getattr(context, name)) is None else found for name in _PLACES]
    given = rows.repetition
    return pack(
        (
            position,
            *places,
            *(getattr(rows, name) for name in SAMPLING_FIELDS),
            *(
                jnp.full_like(none, line.neutral, line.dtype) if given is None else getattr(given, name)
                for name, line in _repetition_scalars().items()
            ),
            *(() if context is None else (context.stop_ids,)),
            *(() if given is None else (given.dry_breakers,)),
        )
    )


def _repetition_scalars() -> dict[str, RowField]:
    return {name: line for name, line in REPETITION_FIELDS.items() if not line.shape}


def row_fields_header() -> str:
    """The text of `native/row_fields.h`."""
    fields = {"position": RowField(np.int32, 0)} | {
        name: RowField(dtype, 0) for name, dtype in _PLACES.items()
    }
    fields |= SAMPLING_FIELDS | _repetition_scalars()
    return _HEADER % "".join(
        f"  {_CPP_TYPES[line.dtype]} {name}{''.join(f'[{size}]' for size in line.shape)};\n"
        for name, line in fields.items()
    )


def native_logprobs(
    logits: Logits, token: jax.Array, wanted: jax.Array, isa: str
) -> tuple[jax.Array, jax.Array]:
    """`graphs.sampling.logprobs.logprobs` in C++; rows that need none get zeros."""
    given = shapes(token.shape[0])
    call = jax.ffi.ffi_call(f"{LOGPROBS}_{isa}", (given.logprob, given.top))
    by_row = isinstance(logits, ByRow)
    values = logits.values if isinstance(logits, ByRow) else logits
    logprob, top = call(values, token, wanted, by_row=by_row)
    return logprob, top


if __name__ == "__main__":
    print(row_fields_header(), end="")
