"""Requests whose constraint is being compiled in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xla_engine.engine.waiter import Pending
from xla_engine.scheduler import FinishReason, Request, RequestView
from xla_engine.text.token_mask import TokenMask


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """It is queued when its constraint is compiled; until then snapshots show it as `view`.

    sequences: how many it will have.
    mask: the compiled constraint, once it is done.
    open: takes it into the table, with its mask.
    on_refused: told why it has none.
    adapter: as in `RowSettings`.
    expires: (time, reason) of its deadlines, the first one first.
    """

    view: RequestView
    sequences: int
    mask: Pending[TokenMask | None]
    open: Callable[..., list[Request]]
    on_refused: Callable[[Exception], object]
    adapter: int
    expires: list[tuple[float, FinishReason]]

    def expired(self, now: float) -> FinishReason | None:
        """Which deadline has passed; None when there is time left."""
        return self.expires[0][1] if self.expires and self.expires[0][0] <= now else None
