"""The decode step for few live rows: computes only the given rows instead of one for every slot."""

import jax
import jax.numpy as jnp

from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import Rows, Tables
from xla_engine.graphs.steps.verify import Drafts, verify_step


def decode_few_rows(
    spec: ModelSpec,
    key_length: int,
    weights: list[jax.Array],
    rope: jax.Array,
    cache: KVCache,
    rows: Rows,
    slots: jax.Array,
    tables: Tables,
    *,
    processed_logprobs: bool = False,
) -> tuple[KVCache, Rows, jax.Array, jax.Array]:
    """`decode_step` for only the rows in `slots i32 [W]`, distinct or -1 for none: a verify step without drafts.

    The results have columns for all B rows, as those of `decode_step`. The bits are the same only if a row's bits do
    not depend on the number of rows and prefill gives the bits of decode.
    """
    total, width = rows.token.shape[0], slots.shape[0]
    none = jnp.zeros(width, jnp.int32)
    alone = Drafts(
        slot=slots, most=none, tokens=none[:, None] - 1, start=none, lookup=none > 0, gated=none > 0
    )
    cache, rows, samples, top = verify_step(
        spec, key_length, 1, weights, rope, cache, rows, alone, tables, processed_logprobs=processed_logprobs
    )

    def in_columns(found: jax.Array, missing: int) -> jax.Array:
        every = jnp.full((len(found), total), missing, found.dtype)
        return every.at[:, jnp.where(slots < 0, total, slots)].set(found, mode="drop")

    return cache, rows, in_columns(samples, -1), in_columns(top, 0)
