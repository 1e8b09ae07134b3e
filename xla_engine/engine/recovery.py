"""Going on after a step that failed, and after an interrupt in the middle of a turn."""

from __future__ import annotations

from collections import deque

from xla_engine.engine.delivery import Delivery
from xla_engine.engine.faults import FAULTS_IN_A_ROW, Faults
from xla_engine.observability.log import engine_log
from xla_engine.runner.in_flight import InFlight
from xla_engine.scheduler import FinishReason
from xla_engine.scheduler.restart import restarted


class Recovery(Delivery):
    """Runs live requests again after a fault, and finds the one that causes it.

    Law 1 makes this exact: a request that runs again gets the tokens that it had.
    """

    _faults: Faults
    _in_flight: deque[InFlight]
    _turning: bool
    _unsettled: bool
    _closed: str | None

    def _recover(self, cause: str) -> None:
        """After a failed turn run the live requests again, or those that may have been its cause apart from others.

        One that fails alone ends with `error`.
        """
        if not self._faults.record(cause):
            self.fail(f"{FAULTS_IN_A_ROW} steps failed in a row, the last with {cause}")
            return
        live = (self._table[name] for name in self._table)
        culprit = self._faults.blame(live, self.scheduler.credited)
        self._restart()
        if culprit is not None and not culprit.finished:
            self.scheduler.finish(culprit.request_id, FinishReason.ERROR)
            message = f"a step failed again with this request alone in it: {cause}"
            engine_log.warning("request %r ends: it was alone in a failed step", culprit.request_id)
            self._end(culprit.request_id, FinishReason.ERROR, message)

    def _settle(self) -> None:
        """Start afresh after an interrupt in the middle of a turn, which leaves unknown what was done."""
        if self._unsettled and not self._turning and self._closed is None:
            self._faults.plan = None
            self._restart()

    def _restart(self) -> None:
        """Run every live request again from its beginning, with state made anew on the device.

        Law 1 makes this exact: a request gets the tokens it already has once more, which are not delivered again, and
        goes on.
        """
        self._in_flight.clear()
        self.scheduler = restarted(self.scheduler, self._faults.only, list(self._table))
        for name in self._table:
            self._table[name].rewind()
        self._table.token_buffer.clear()
        if self._speculator is not None:
            self._speculator.restart()
        if self._shadow is not None:
            self._shadow.restart()
        try:
            self.runner.rebuild()
        except Exception as error:
            self.fail(f"the device state was lost and cannot be made again: {type(error).__name__}: {error}")
        self._unsettled = False

    def fail(self, cause: str) -> None:
        """Close the engine for a cause: every request ends with reason `error`, and later submits fail at once."""
        self._closed = cause
        engine_log.error("the engine is closed, and %d sequences end: %s", len(self._table), cause)
        self._in_flight.clear()
        for name in self._table:
            self.scheduler.finish(name, FinishReason.ERROR)
            self._end(name, FinishReason.ERROR, cause)
