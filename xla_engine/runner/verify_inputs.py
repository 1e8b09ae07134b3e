"""The input arrays of a verify call, and the interpretation of its output."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xla_engine.graphs.row_state.rows import NOT_KEPT
from xla_engine.graphs.steps.verify import Drafts
from xla_engine.scheduler import NO_TOKEN, ResultMismatchError, VerifyRow

HELD = 3  # times the width: the most expected tokens sent for a row, since several steps may be in flight


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
