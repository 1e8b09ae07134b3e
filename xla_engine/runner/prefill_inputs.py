"""The input arrays of a prefill call."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.steps.prefill import Lanes
from xla_engine.runner.row_settings import RowSettings, sampling_rows
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.scheduler import Chunk


def make_lanes(
    chunks: Sequence[Chunk],
    last: Mapping[int, RowSettings],
    lanes: int,
    chunk_size: int,
    *,
    dry: bool = False,
    adapters: Sequence[int] | None = None,
    whole: Sequence[bool] | None = None,
    feature: Any = None,
    placed: Sequence[RowSettings] | None = None,
) -> Lanes:
    """Host arrays of one prefill call.

    last: by lane, the settings of rows that complete their prompt. dry: include the parameters of DRY.
    adapters: adapter slots of the chunks; None in an engine without adapters. whole: of the chunks, as in `Lanes`;
        None: all true. feature: as in `Lanes`. placed: the settings of the chunks, whose positions matter; None: they
        do not.
    """
    # Any, because the fields of `Lanes` are declared as jax arrays.
    tokens: Any = np.zeros((lanes, chunk_size), np.int32)
    slot, start, count, prompt_length, max_tokens, min_tokens = cast("Any", np.zeros((6, lanes), np.int32))
    is_last: Any = np.zeros(lanes, np.bool_)
    stop_ids: Any = np.full((lanes, MAX_STOP_TOKEN_IDS), -1, np.int32)
    adapter: Any = None if adapters is None else np.zeros(lanes, np.int32)
    if adapters is not None:
        adapter[: len(adapters)] = adapters
    is_whole: Any = np.ones(lanes, np.bool_)
    if whole is not None:
        is_whole[: len(whole)] = whole
    for lane, chunk in enumerate(chunks):
        tokens[lane, : len(chunk.tokens)] = chunk.tokens
        slot[lane], start[lane], count[lane] = chunk.slot.index, chunk.start, len(chunk.tokens)
    for lane, row in last.items():
        done = chunks[lane].generated
        is_last[lane], prompt_length[lane] = True, start[lane] + count[lane] - done
        max_tokens[lane], min_tokens[lane] = row.max_tokens - done, max(row.min_tokens - done, 0)
        stop_ids[lane, : len(row.stop_token_ids)] = row.stop_token_ids
    positions: Any = None if placed is None else np.zeros((lanes, chunk_size, 3), np.int32)
    turn: Any = None if placed is None else np.zeros(lanes, np.int32)
    for lane, row in enumerate(placed or ()):
        turn[lane] = row.turn
        positions[lane] = (np.arange(start[lane], start[lane] + chunk_size, dtype=np.int32) + row.turn)[
            :, None
        ]
        if row.positions is not None:
            part = row.positions[start[lane] : start[lane] + chunk_size]
            positions[lane, : len(part)] = part
    return Lanes(
        tokens=tokens,
        slot=slot,
        start=start,
        count=count,
        is_last=is_last,
        prompt_length=prompt_length,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        sampling=sampling_rows(lanes, last, dry=dry),
        whole=is_whole,
        adapter=adapter,
        feature=feature,
        positions=positions,
        turn=turn,
    )


def idle_lanes(config: EngineConfig, lanes: int, *, turns: bool = False) -> Lanes:
    """The input of a prefill call without work. turns: with `Lanes.positions`."""
    adapters = () if config.enable_lora else None
    feature = np.full((lanes, config.chunk_size), -1, np.int32) if config.image_cache_bytes else None
    return make_lanes(
        [],
        {},
        lanes,
        config.chunk_size,
        dry=config.enable_dry,
        adapters=adapters,
        feature=feature,
        placed=() if turns else None,
    )


def prompt_targets(chunk: Chunk, row: RowSettings) -> tuple[int, ...]:
    """The prompt tokens that the positions of a chunk predict; none if all are before `logprobs_start`."""
    if chunk.start + len(chunk.tokens) < row.params.logprobs_start:
        return ()
    return row.prompt_token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
