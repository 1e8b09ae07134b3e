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

# The fields of `SamplingContext` that C++ gets for each row, in addition to its position and the sampling table.
_PLACES = ("live", "slot", "length", "prompt_length", "min_remaining", "draft")
_CPP_TYPES: dict[type[np.generic], str] = {np.uint32: "uint32_t", np.int32: "int32_t", np.float32: "float"}
_HEADER = """// Generated from the sampling table by `python -m xla_engine.graphs.sampling.native`. Do not edit.

#pragma once

#include <cstdint>

namespace xla_engine {

// One row: its place, and its sampling parameters in the order of the table.
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
    return ByRow(call(*given, by_row=isinstance(logits, ByRow)))


def _inputs(
    logits: Logits, rows: SamplingRows, position: jax.Array, context: SamplingContext | None
) -> list[jax.Array]:
    """Logits; places of rows i32 `[7, N]`, their sampling parameters u32 `[N, W]` and stop ids i32 `[N, E]`; and the
    tables of all slots, which are empty without a context."""
    none, no_words = jnp.zeros(0, jnp.int32), jnp.zeros(0, WORD)
    unset, stop_ids = jnp.zeros_like(position), jnp.zeros((len(position), 0), jnp.int32)
    places = [jnp.ones_like(position), *[unset] * (len(_PLACES) - 1)]
    wide = [none, none, none, jnp.zeros(0, jnp.float32), no_words, no_words]
    if context is not None:
        tables, stop_ids = context.tables, context.stop_ids
        given = (getattr(context, name) for name in _PLACES)
        places = [unset if each is None else each.astype(jnp.int32) for each in given]
        wide = [
            context.history,
            none if context.block_tables is None else context.block_tables,
            tables.bias_ids,
            tables.bias,
            tables.mask,
            no_words if context.draft is None or tables.draft_masks is None else tables.draft_masks,
        ]
    values = logits.values if isinstance(logits, ByRow) else logits
    return [values, jnp.stack([position, *places]), pack(rows), stop_ids, *wide]


def row_fields_header() -> str:
    """The text of `native/row_fields.h`."""
    fields = {name: RowField(np.int32, 0) for name in ("position", *_PLACES)} | SAMPLING_FIELDS
    fields |= {name: line for name, line in REPETITION_FIELDS.items() if not line.shape}
    return _HEADER % "".join(
        f"  {_CPP_TYPES[line.dtype]} {name}{''.join(f'[{size}]' for size in line.shape)}{{{line.neutral}}};\n"
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
