"""The programs of a runner: their names, functions and abstract arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import Program
from xla_engine.graphs.kv_cache.block_io import blocks_per_call, copy_blocks, read_blocks, write_blocks
from xla_engine.graphs.kv_cache.slot_io import copy_span, read_span, write_span
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.packing import pack, unpack
from xla_engine.graphs.row_state.rows import Rows, RowState, Tables, pack_rows, unpack_rows
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import prefill_chunk
from xla_engine.graphs.steps.prompt_logprobs import prompt_logprobs
from xla_engine.graphs.steps.verify import verify_step
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.runner.verify_inputs import no_drafts

COPY, READ, WRITE = "copy_block", "read_block", "write_block"
COPY_BLOCKS, READ_BLOCKS, WRITE_BLOCKS = "copy_pages", "read_pages", "write_pages"


def make_programs(
    spec: ModelSpec,
    config: EngineConfig,
    buckets: Sequence[int],
    *,
    weights: list[jax.Array],
    rope: jax.Array,
    cache: KVCache,
    rows: Rows,
    tables: Tables,
) -> list[Program]:
    """All programs of one engine. `buckets` are the key lengths; of the arrays only the shapes matter.

    Row state and lanes are packed (`graphs.row_state.packing`) outside of the programs.
    """
    rows = _abstract(rows)
    state = (*_abstract((weights, rope, cache)), jax.eval_shape(pack_rows, rows))
    scheduled = jax.ShapeDtypeStruct((config.device_rows,), jnp.bool_)
    wide = _abstract(tables)
    processed = config.logprobs_mode == "processed_logprobs"
    programs = []
    for bucket in buckets:
        programs.append(
            Program(
                name=decode_name(bucket),
                function=_on_packed(
                    functools.partial(decode_step, spec, bucket, processed_logprobs=processed), rows
                ),
                arguments=(*state, scheduled, wide),
                donate=(2, 3),
            )
        )
        programs.extend(
            Program(
                name=prefill_name(lanes, bucket),
                function=_on_packed(
                    functools.partial(
                        prefill_chunk, spec, bucket, config.head_rows, processed_logprobs=processed
                    ),
                    rows,
                    idle,
                ),
                arguments=(*state, _abstract(pack(idle)), wide),
                donate=(2, 3),
            )
            for lanes in config.prefill_lanes
            for idle in [make_lanes([], {}, lanes, config.chunk_size)]
        )
        programs.extend(
            Program(
                name=verify_name(lanes, width, bucket),
                function=_on_packed(
                    functools.partial(verify_step, spec, bucket, width, processed_logprobs=processed),
                    rows,
                    idle,
                ),
                arguments=(*state, _abstract(pack(idle)), wide),
                donate=(2, 3),
            )
            for lanes, width in config.verify_shapes
            for idle in [no_drafts(lanes, width)]
        )
    for lanes in config.prefill_lanes:
        tokens = lanes * config.chunk_size
        hidden = jax.ShapeDtypeStruct((tokens, spec.config.hidden_size), jnp.float32)
        programs.append(
            Program(
                name=prompt_name(lanes),
                function=functools.partial(prompt_logprobs, spec, config.head_rows),
                arguments=(state[0], hidden, jax.ShapeDtypeStruct((tokens,), jnp.int32)),
            )
        )
    return [*programs, *_moves(spec, config, state[2:])]


def _moves(spec: ModelSpec, config: EngineConfig, held: tuple[Any, ...]) -> list[Program]:
    """Programs that move the content of slots, or of their blocks. `held`: abstract cache and row state."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    write: Callable[..., Any]
    if config.num_blocks is None:
        copy = _move(COPY, copy_span, spec, (*held, *[scalar] * 4))
        read = _move(READ, read_span, spec, (*held, *[scalar] * 2), donate=())
        name, write, place, copies = WRITE, write_span, [scalar] * 3, config.reuses_slots
    else:
        blocks = jax.ShapeDtypeStruct((blocks_per_call(config.block_size),), jnp.int32)
        copy = _move(COPY_BLOCKS, copy_blocks, spec, (*held, blocks, blocks, scalar))
        read = _move(READ_BLOCKS, read_blocks, spec, (*held, scalar, blocks), donate=())
        name, write, place, copies = WRITE_BLOCKS, write_blocks, [scalar, blocks, scalar, scalar], True
    moves = [copy] if copies else []
    if config.parks:
        moved = jax.eval_shape(read.function, *read.arguments)
        moves += [read, _move(name, write, spec, (*held, *place, *moved))]
    return moves


def _on_packed(function: Callable[..., Any], rows: Rows, lanes: Any = None) -> Callable[..., Any]:
    """`function(weights, rope, cache, rows, work, tables)` with its rows packed, and its work if it is lanes."""

    def run(
        weights: list[jax.Array], rope: jax.Array, cache: KVCache, state: RowState, work: Any, tables: Tables
    ) -> tuple[Any, ...]:
        work = work if lanes is None else unpack(work, lanes)
        cache, after, *results = function(weights, rope, cache, unpack_rows(state, rows), work, tables)
        return cache, pack_rows(after), *results

    return run


def _move(
    name: str,
    function: Callable[..., Any],
    spec: ModelSpec,
    arguments: tuple[Any, ...],
    donate: tuple[int, ...] = (0, 1),
) -> Program:
    return Program(name=name, function=functools.partial(function, spec), arguments=arguments, donate=donate)


def decode_name(key_length: int) -> str:
    return f"decode[keys={key_length}]"


def prefill_name(lanes: int, key_length: int) -> str:
    return f"prefill[lanes={lanes},keys={key_length}]"


def verify_name(lanes: int, width: int, key_length: int) -> str:
    return f"verify[lanes={lanes},width={width},keys={key_length}]"


def prompt_name(lanes: int) -> str:
    return f"prompt_logprobs[lanes={lanes}]"


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
