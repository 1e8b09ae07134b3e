"""The programs of a runner: their names, functions and abstract arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.kv_cache.cache import (
    KVCache,
    States,
    copy_state,
    read_state,
    states_of,
    write_state,
)
from xla_engine.graphs.kv_cache.moves import (
    blocks_per_call,
    copy_blocks,
    copy_span,
    load_blocks,
    read_blocks,
    read_span,
    write_blocks,
    write_span,
)
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import (
    Rows,
    RowState,
    Tables,
    pack,
    pack_rows,
    unpack,
    unpack_rows,
    with_remaining,
)
from xla_engine.graphs.steps.after_prefill import pool_chunk, prompt_logits, prompt_logprobs
from xla_engine.graphs.steps.decode import decode_few_rows, decode_step
from xla_engine.graphs.steps.prefill import PrefillForm, prefill_chunk
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.graphs.steps.verify import verify_step
from xla_engine.runner.adapters import writing
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.features import FeatureBuffer
from xla_engine.runner.inputs import idle_lanes, no_drafts

# Kinds of programs, named by sizes: lanes, width and keys, as far as these tell programs of a kind apart.
PREFILL, VERIFY = "prefill", "verify"
READ_PROMPTS, POOL = "read_prompts", "pool"
PROMPT_LOGPROBS, PROMPT_LOGITS = "prompt_logprobs", "prompt_logits"
COPY, READ, WRITE = "copy_span", "read_span", "write_span"
CONTINUE = "continue_row"
COPY_BLOCKS, READ_BLOCKS, WRITE_BLOCKS = "copy_blocks", "read_blocks", "write_blocks"
LOAD_BLOCKS = "load_blocks"
SAVE_STATE, RESTORE_STATE = "save_state", "restore_state"
READ_STATE, WRITE_STATE = "read_state", "write_state"
READ_SAVED, WRITE_SAVED = "read_saved_state", "write_saved_state"


def make_programs(
    spec: ModelSpec,
    config: EngineConfig,
    buckets: Sequence[int],
    few: Sequence[int] = (),
    *,
    state: StepState,
    saved: States,
    device_proposer: DeviceProposer | None = None,
    pooling: str | None = None,
    features: FeatureBuffer | None = None,
) -> list[Program]:
    """All programs of one engine. Only the shapes of the arrays matter.

    state: what steps take, with unpacked rows.
    buckets: the key lengths. few: the numbers of rows for which there are separate decode programs.
    device_proposer: drafts inside the verify programs, which then also take and return its state.
    pooling: one of `graphs.config.POOLING_TYPES`; None: prompts are not pooled.
    features: which prefill reads; None without a vision tower.
    saved: the room for saved states of recurrent layers; empty: none are saved.

    Row state and lanes are packed (`graphs.row_state.rows`) between programs.
    """
    weights, rope, cache, rows, tables = StepState(*_abstract(state))
    taken = (weights, rope, cache, jax.eval_shape(pack_rows, rows))
    scheduled = jax.ShapeDtypeStruct((config.device_rows,), jnp.bool_)
    processed = config.logprobs_mode == "processed_logprobs"
    proposer = device_proposer
    taps = () if proposer is None else proposer.taps
    verify = verify_step if proposer is None else proposer.verify
    proposer_state = () if proposer is None else _abstract(proposer.takes)
    more = () if features is None else (_abstract(features.rows),)
    sighted = {} if features is None else features.prefill_form
    programs: list[Program] = []

    def add(
        name: str,
        function: Callable[..., Any],
        work: Any,
        idle: Any = None,
        more: tuple[Any, ...] = (),
        donate: tuple[int, ...] = (2, 3),
        isa: str | None = None,
    ) -> None:
        """Add a step. work: its abstract input; None: that of `idle`, an input without work, which defines the layout
        of packed ones. more: further abstract inputs. isa: as of `Program`."""
        run = _on_packed(function, rows, idle)
        arguments = (*taken, _abstract(pack(idle)) if work is None else work, tables, *more)
        programs.append(Program(name=name, function=run, arguments=arguments, donate=donate, isa=isa))

    for bucket in buckets:
        form = StepForm(spec, bucket, processed)
        add(decode_name(bucket), functools.partial(decode_step, form), scheduled, isa=spec.isa)
        prefill = functools.partial(prefill_chunk, PrefillForm(form, config.head_rows, taps, **sighted))
        for lanes in config.prefill_lanes:
            idle = idle_lanes(config, lanes, features)
            add(program_name(PREFILL, lanes=lanes, keys=bucket), prefill, None, idle, more)
        donate = (2, 3, 5 + len(proposer_state)) if proposer_state else (2, 3)
        for lanes, width in config.verify_shapes:
            checks = functools.partial(verify, form, width)
            name = program_name(VERIFY, lanes=lanes, width=width, keys=bucket)
            add(name, checks, None, no_drafts(lanes, width), proposer_state, donate, spec.isa)
        for width in few:
            few_rows = functools.partial(decode_few_rows, form)
            slots = jax.ShapeDtypeStruct((width,), jnp.int32)
            add(decode_name(bucket, width), few_rows, slots, isa=spec.isa)
    for lanes in config.prefill_lanes:
        tokens = lanes * config.chunk_size
        logprobs = functools.partial(prompt_logprobs, spec, config.head_rows)
        programs.append(_of_hidden(PROMPT_LOGPROBS, lanes, logprobs, spec, weights, tokens, tokens))
        if pooling is not None:
            pool = functools.partial(pool_chunk, spec, pooling, config.chunk_size)
            programs.append(_of_hidden(POOL, lanes, pool, spec, weights, tokens, lanes))
        if proposer is not None and proposer.read is not None:
            idle = idle_lanes(config, lanes, features)
            width = spec.config.hidden_size * max(1, len(taps))
            seen = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
            programs.append(
                Program(
                    name=program_name(READ_PROMPTS, lanes=lanes),
                    function=proposer.read(StepForm(spec, buckets[-1]), idle),
                    arguments=(weights, rope, seen, _abstract(pack(idle)), *proposer_state),
                    donate=(3 + len(proposer_state),),
                )
            )
    if config.keep_finished:
        programs.append(_continue(rows, taken[3]))
    moves = (*_moves(spec, config, taken[2:]), *_state_moves(config, _abstract(saved), states_of(cache)))
    return [*programs, *moves, *writing(spec, state.weights)]


def logits_programs(
    spec: ModelSpec, config: EngineConfig, lane_choices: Sequence[int], weights: list[Any]
) -> list[Program]:
    """Programs that return the logits of prompt positions. They are compiled on demand by `Runner.giving_logits`."""
    function = functools.partial(prompt_logits, spec, config.head_rows)
    sizes = {lanes: lanes * config.chunk_size for lanes in lane_choices}
    return [
        _of_hidden(PROMPT_LOGITS, lanes, function, spec, _abstract(weights), tokens, tokens)
        for lanes, tokens in sizes.items()
    ]


def _of_hidden(
    kind: str,
    lanes: int,
    function: Callable[..., Any],
    spec: ModelSpec,
    weights: Any,
    tokens: int,
    count: int,
) -> Program:
    """A program of weights, the hidden states of a prefill call of `tokens` positions, and `count` integers."""
    hidden = jax.ShapeDtypeStruct((tokens, spec.config.hidden_size), jnp.float32)
    asked = jax.ShapeDtypeStruct((count,), jnp.int32)
    name = program_name(kind, lanes=lanes)
    return Program(name=name, function=function, arguments=(weights, hidden, asked))


def _continue(rows: Rows, state: RowState) -> Program:
    """The program that gives a finished row more tokens to sample."""

    def run(state: RowState, slot: jax.Array, remaining: jax.Array) -> tuple[RowState]:
        return (pack_rows(with_remaining(unpack_rows(state, rows), slot, remaining)),)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return Program(name=CONTINUE, function=run, arguments=(state, scalar, scalar), donate=(0,))


def _moves(spec: ModelSpec, config: EngineConfig, donated: tuple[Any, ...]) -> list[Program]:
    """Programs that move the content of slots or blocks. donated: abstract cache and row state."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    write: Callable[..., Any]
    if config.num_blocks is None:
        copy = _move(COPY, copy_span, spec, (*donated, *[scalar] * 4))
        read = _move(READ, read_span, spec, (*donated, *[scalar] * 2), donate=())
        name, write, place, copies = WRITE, write_span, [scalar] * 3, config.reuses_slots
    else:
        blocks = jax.ShapeDtypeStruct((blocks_per_call(config.block_size),), jnp.int32)
        copy = _move(COPY_BLOCKS, copy_blocks, spec, (*donated, blocks, blocks, scalar))
        read = _move(READ_BLOCKS, read_blocks, spec, (*donated, scalar, blocks), donate=())
        name, write, place, copies = WRITE_BLOCKS, write_blocks, [scalar, blocks, scalar, scalar], True
    moves = [copy] if copies else []
    if config.parks:
        moved = jax.eval_shape(read.function, *read.arguments)
        moves += [read, _move(name, write, spec, (*donated, *place, *moved))]
        if config.prefix_cache_dir is not None:
            moves.append(_move(LOAD_BLOCKS, load_blocks, spec, (*donated, *place[1:], moved[0])))
    return moves


def _state_moves(config: EngineConfig, saved: States, states: States) -> list[Program]:
    """Programs that save the recurrent states of slots, restore them, and move them to the host and back. saved: room
    for states; states: those of slots; both are abstract, and empty if there is nothing to move."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    moves = ((SAVE_STATE, saved, states), (RESTORE_STATE, states, saved)) if saved else ()
    programs = [
        Program(name=name, function=copy_state, arguments=(target, source, scalar, scalar), donate=(0,))
        for name, target, source in moves
    ]
    if states and config.parks:
        programs += _host_moves(READ_STATE, WRITE_STATE, states)
    if saved and config.prefix_cache_dir is not None:
        programs += _host_moves(READ_SAVED, WRITE_SAVED, saved)
    return programs


def _host_moves(read: str, write: str, states: States) -> list[Program]:
    """The programs of these names, which read and write one state of several."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    (moved,) = jax.eval_shape(read_state, states, scalar)
    return [
        Program(name=read, function=read_state, arguments=(states, scalar), donate=()),
        Program(name=write, function=write_state, arguments=(states, scalar, moved), donate=(0,)),
    ]


def _on_packed(function: Callable[..., Any], rows: Rows, lanes: Any = None) -> Callable[..., Any]:
    """`function(state, work, *more)` on packed rows. lanes: layout of packed `work`."""

    def run(
        weights: list[jax.Array],
        rope: jax.Array,
        cache: KVCache,
        state: RowState,
        work: Any,
        tables: Tables,
        *more: Any,
    ) -> tuple[Any, ...]:
        work = work if lanes is None else unpack(work, lanes)
        taken = StepState(weights, rope, cache, unpack_rows(state, rows), tables)
        cache, after, *results = function(taken, work, *more)
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


def decode_name(key_length: int, rows: int | None = None) -> str:
    """The name of a decode program. rows: of a program of few rows; None: all rows."""
    few = {} if rows is None else {"rows": rows}
    return program_name("decode", **few, keys=key_length)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
