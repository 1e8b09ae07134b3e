"""Requests whose constraint is being compiled in the background."""

from collections.abc import Callable
from dataclasses import dataclass

from xla_engine.engine.waiter import Pending
from xla_engine.scheduler import FinishReason, Request, RequestView
from xla_engine.text.token_mask import TokenMask


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request that is queued once its constraint is compiled; until then snapshots show it as `view`.

    sequences: how many sequences it will have.
    mask: the call that compiles the constraint.
    open: enters the request into the table, with its mask.
    on_refused: called with the error if the constraint is invalid.
    adapter: as in `RowSettings`.
    expires: (time, reason) of its deadlines, earliest first.
    """

    view: RequestView
    sequences: int
    mask: Pending[TokenMask | None]
    open: Callable[..., list[Request]]
    on_refused: Callable[[Exception], object]
    adapter: int
    expires: list[tuple[float, FinishReason]]

    def expired(self, now: float) -> FinishReason | None:
        """The reason of a deadline that has passed; None if there is none."""
        return self.expires[0][1] if self.expires and self.expires[0][0] <= now else None
