"""The input arrays of prefill and verify calls, and the interpretation of what a verify call returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.row_state.rows import NOT_KEPT
from xla_engine.graphs.steps.prefill import Lanes
from xla_engine.graphs.steps.verify import Drafts
from xla_engine.runner.row_settings import RowSettings, sampling_rows
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.scheduler import NO_TOKEN, Chunk, ResultMismatchError, VerifyRow

if TYPE_CHECKING:
    from xla_engine.runner.features import FeatureBuffer

# A draft may have this many times the width of a verify step in tokens: the steps in flight consume up to `width` of
# them each before this one runs, and the host does not know yet how many.
HELD = 3


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
    reach: Any = None,
    placed: Sequence[RowSettings] | None = None,
) -> Lanes:
    """Host arrays of one prefill call.

    last: the settings of the rows that complete their prompt, by lane.
    dry: include the parameters of DRY.
    adapters: adapter slots of the chunks; None in an engine without adapters.
    whole: whether each chunk is whole, as in `Lanes`; None: all are.
    feature, reach: as in `Lanes`.
    placed: the settings of the chunks, if their positions are not simply 0, 1, .. (M-RoPE); otherwise None.
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
    rope_offset: Any = None if placed is None else np.zeros(lanes, np.int32)
    for lane, row in enumerate(placed or ()):
        rope_offset[lane] = row.rope_offset
        positions[lane] = (
            np.arange(start[lane], start[lane] + chunk_size, dtype=np.int32) + row.rope_offset
        )[:, None]
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
        reach=reach,
        positions=positions,
        rope_offset=rope_offset,
    )


def idle_lanes(config: EngineConfig, lanes: int, features: FeatureBuffer | None = None) -> Lanes:
    """The input of a prefill call without work. features: None without a vision tower."""
    adapters = () if config.enable_lora else None
    return make_lanes(
        [],
        {},
        lanes,
        config.chunk_size,
        dry=config.enable_dry,
        adapters=adapters,
        **({} if features is None else features.fields((), lanes, config.chunk_size)),
        placed=() if features is not None and features.turns else None,
    )


def prompt_targets(chunk: Chunk, row: RowSettings) -> tuple[int, ...]:
    """The prompt tokens that the positions of a chunk predict; none if all are before `logprobs_start`."""
    if chunk.start + len(chunk.tokens) < row.params.logprobs_start:
        return ()
    return row.prompt_token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]


class Draft(NamedTuple):
    """The tokens that the host expects in a sequence from position `start` on.

    lookup: the device may use prompt lookup if they do not fit.
    masks: for a constrained row, the mask after each of `tokens`, u32 `[ceil(V / 32)]`; it has no other drafts.
    """

    start: int = 0
    tokens: Sequence[int] = ()
    lookup: bool = False
    masks: Sequence[np.ndarray] = ()


NO_DRAFT = Draft()


def no_drafts(lanes: int, width: int) -> Drafts:
    """The input of a verify call without rows, as host arrays."""
    host: Any = np  # Any, because the fields of `Drafts` are declared as jax arrays
    return Drafts(
        slot=host.full(lanes, -1, np.int32),
        most=host.zeros(lanes, np.int32),
        tokens=host.full((lanes, HELD * width), -1, np.int32),
        start=host.zeros(lanes, np.int32),
        lookup=host.zeros(lanes, np.bool_),
        gated=host.zeros(lanes, np.bool_),
    )


def make_drafts(rows: Sequence[VerifyRow], proposed: Mapping[str, Draft], lanes: int, width: int) -> Drafts:
    """Host arrays of one verify call."""
    drafts: Any = no_drafts(lanes, width)
    for lane, row in enumerate(rows):
        draft = proposed.get(row.request_id, NO_DRAFT)
        tokens = draft.tokens[: HELD * width]
        drafts.slot[lane], drafts.most[lane] = row.slot.index, row.width - 1
        drafts.start[lane], drafts.tokens[lane, : len(tokens)] = draft.start, tokens
        drafts.lookup[lane], drafts.gated[lane] = draft.lookup, bool(draft.masks)
    return drafts


def kept(tokens: Sequence[int], row: VerifyRow) -> tuple[int, int]:
    """How many of a lane's `tokens` were emitted, and how many drafts it had. Raises ResultMismatchError."""
    fed = len(tokens) - sum(token == NO_TOKEN for token in tokens)
    count = fed - sum(token == NOT_KEPT for token in tokens)
    if NO_TOKEN in tokens[:fed] or NOT_KEPT in tokens[:count]:
        raise ResultMismatchError(f"{row.request_id!r} in slot {row.slot.index} sampled {list(tokens)}")
    return count, max(fed - 1, 0)
