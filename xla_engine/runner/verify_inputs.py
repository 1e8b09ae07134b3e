"""One verify call, as the arrays that go up, and what comes back of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xla_engine.graphs.row_state.rows import NOT_KEPT
from xla_engine.graphs.steps.verify import Drafts
from xla_engine.scheduler import NO_TOKEN, ResultMismatchError, VerifyRow

HELD = 3  # widths of tokens that the host may send for a row: as many steps may be in flight


class Draft(NamedTuple):
    """What the host expects of a sequence at positions `start ..`.

    lookup: the row may look its end up in itself where this does not fit.
    masks: of a constrained row, the tokens allowed behind each of `tokens`, u32 `[ceil(V / 32)]`; it has no other
        drafts.
    """

    start: int = 0
    tokens: Sequence[int] = ()
    lookup: bool = False
    masks: Sequence[np.ndarray] = ()


NO_DRAFT = Draft()


def no_drafts(lanes: int, width: int) -> Drafts:
    """A call without a row, as host arrays."""
    host: Any = np  # the record is declared for the arrays a graph sees
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
    """How many of a lane's `tokens` the row keeps, and how many drafts it had. Raises ResultMismatchError."""
    fed = len(tokens) - sum(token == NO_TOKEN for token in tokens)
    count = fed - sum(token == NOT_KEPT for token in tokens)
    if NO_TOKEN in tokens[:fed] or NOT_KEPT in tokens[:count]:
        raise ResultMismatchError(f"{row.request_id!r} in slot {row.slot.index} sampled {list(tokens)}")
    return count, max(fed - 1, 0)
