"""The token masks of constrained rows: computed between two steps, or in the background if they may be slow."""

import time
from collections.abc import Callable, Collection

from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.text.token_mask import TURN_S
from xla_engine.utils.call_thread import CallThread, Pending


class MaskMaker:
    """Advances masks by the tokens that their rows got. A row whose mask is not ready skips the step.

    A turn spends at most `TURN_S` seconds on masks. Constraints known to be slow are computed in a background thread,
    and the turn does not wait for them beyond that time. llguidance releases the GIL meanwhile.

    replay: for replays; returns the ids of the rows that skip the step, in place of the time limit. All other masks
        are waited for.
    on_made: called in the background thread when a mask is ready.
    seconds: wall time of all calls of `make`.
    """

    def __init__(self) -> None:
        self.replay: Callable[[], Collection[str]] | None = None
        self.seconds = 0.0
        self.on_made: Callable[[], object] = lambda: None
        self._rows: dict[LiveSequence, Pending[None] | BaseException | None] = {}
        self._maker = CallThread()
        self.close = self._maker.close

    def __bool__(self) -> bool:
        return bool(self._rows) or self.replay is not None

    @property
    def making(self) -> bool:
        """Whether a mask of a live row is not ready."""
        return any(not row.finished for row in self._rows)

    def add(self, row: LiveSequence) -> None:
        """Note that a constrained row got a token, or is extended, so its mask must be advanced."""
        self._rows.setdefault(row, None)

    def make(self, *, overlaps: bool = True) -> frozenset[str]:
        """Compute the masks that a turn has time for; returns the ids of the rows that skip the step.

        overlaps: the device runs a step meanwhile. Otherwise the turn waits for constraints known to be slow only if
            no more rows have others, because the wait would delay every row.
        """
        began = time.monotonic()
        self._collect()
        spent, made, asked = 0.0, 0, []
        for row, state in list(self._rows.items()):
            mask = row.mask
            if row.finished or mask is None:
                del self._rows[row]
            elif state is not None:
                continue  # in progress, or failed
            elif not mask.is_behind:
                del self._rows[row]
            elif mask.may_be_slow or spent > TURN_S:
                pending = self._rows[row] = self._maker.ask(mask.make, self.on_made)
                if mask.seconds <= TURN_S:
                    asked.append(pending)
            else:
                try:
                    mask.make()
                    made += 1
                    del self._rows[row]
                except Exception as error:
                    self._rows[row] = error
                spent += mask.seconds
        until = time.monotonic() + TURN_S - spent
        for pending in asked if overlaps or len(asked) >= made else ():
            pending.done.wait(max(until - time.monotonic(), 0))
        held = () if self.replay is None else self.replay()
        for row, state in self._rows.items():
            if self.replay is not None and row.request_id not in held and isinstance(state, Pending):
                state.done.wait()
        self._collect()
        self.seconds += time.monotonic() - began
        return frozenset((*held, *(row.request_id for row in self._rows)))

    def take_failed(self) -> list[tuple[LiveSequence, BaseException]]:
        """Remove and return the rows whose mask failed, with the errors."""
        failed = [(row, state) for row, state in self._rows.items() if isinstance(state, BaseException)]
        for row, _ in failed:
            del self._rows[row]
        return failed

    def _collect(self) -> None:
        """Collect the results of the background thread."""
        for row, state in list(self._rows.items()):
            if not isinstance(state, Pending) or not state.done.is_set():
                continue
            if row.mask is None or not row.mask.is_behind:
                del self._rows[row]
            else:  # it failed, or the row was rewound meanwhile: then the answer is None and the mask is made again
                self._rows[row] = state.answer
