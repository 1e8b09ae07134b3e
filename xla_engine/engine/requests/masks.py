"""The masks of constrained rows: made between two steps, or in the background where that may take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.waiter import Pending, Waiter
from xla_engine.text.token_mask import TURN_S


class MaskMaker:
    """Brings masks up to the tokens that their rows got; a row whose mask is not there yet sits out.

    A turn makes masks for `TURN_S` at most, and those of constraints that were seen to be slow are made by another
    thread, for which it waits no longer. llguidance lets other threads run meanwhile.

    replay: says which rows sit out, by id, in place of the clock; all others are waited for.
    on_made: called in the other thread when it has made a mask.
    """

    def __init__(self) -> None:
        self.replay: Callable[[], Collection[str]] | None = None
        self.on_made: Callable[[], object] = lambda: None
        self._rows: dict[LiveSequence, Pending[None] | BaseException | None] = {}
        self._maker = Waiter()
        self.close = self._maker.close

    def __bool__(self) -> bool:
        return bool(self._rows) or self.replay is not None

    @property
    def making(self) -> bool:
        """Whether a live row waits for its mask."""
        return any(not row.finished for row in self._rows)

    def add(self, row: LiveSequence) -> None:
        """A constrained row got a token, or goes on."""
        self._rows.setdefault(row, None)

    def make(self) -> frozenset[str]:
        """Make the masks that a turn has time for; returns the rows that sit out, by id."""
        self._collect()
        spent, asked = 0.0, []
        for row, state in list(self._rows.items()):
            mask = row.mask
            if row.finished or mask is None:
                del self._rows[row]
            elif state is not None:
                continue  # it is being made, or has failed
            elif not mask.is_behind:
                del self._rows[row]
            elif mask.may_be_slow or spent > TURN_S:
                pending = self._rows[row] = self._maker.ask(mask.make, self.on_made)
                if mask.seconds <= TURN_S:
                    asked.append(pending)
            else:
                try:
                    mask.make()
                    del self._rows[row]
                except Exception as error:
                    self._rows[row] = error
                spent += mask.seconds
        until = time.monotonic() + TURN_S - spent
        for pending in asked:
            pending.done.wait(max(until - time.monotonic(), 0))
        held = () if self.replay is None else self.replay()
        for row, state in self._rows.items():
            if self.replay is not None and row.request_id not in held and isinstance(state, Pending):
                state.done.wait()
        self._collect()
        return frozenset((*held, *(row.request_id for row in self._rows)))

    def take_failed(self) -> list[tuple[LiveSequence, BaseException]]:
        """The rows that have no next token, and why; they are forgotten here."""
        failed = [(row, state) for row, state in self._rows.items() if isinstance(state, BaseException)]
        for row, _ in failed:
            del self._rows[row]
        return failed

    def _collect(self) -> None:
        """Take up what the other thread has made."""
        for row, state in list(self._rows.items()):
            if not isinstance(state, Pending) or not state.done.is_set():
                continue
            if row.mask is None or not row.mask.is_behind:
                del self._rows[row]
            else:  # it has failed, or was of tokens that the row lost meanwhile
                self._rows[row] = state.answer
