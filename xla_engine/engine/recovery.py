"""Going on after a step that failed, and after an interrupt in the middle of a turn."""

from __future__ import annotations

from xla_engine.engine.canary import Canary
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.faults import Faults
from xla_engine.engine.state import EngineState
from xla_engine.observability.log import engine_log
from xla_engine.scheduler import FinishReason, Plan, StepResult


class Recovery:
    """Runs live requests again after a fault, and finds the one that causes it.

    Law 1 makes this exact: a request that runs again gets the tokens that it had.

    canary: runs alone, where a request has failed alone.
    """

    def __init__(self, state: EngineState, delivery: Delivery) -> None:
        self.faults = Faults()
        self.canary: Canary | None = None
        self._state = state
        self._delivery = delivery

    def after(self, error: Exception) -> None:
        """After a failed turn run the live requests again, or those that may have been its cause apart from others.

        Once a request has failed alone, a canary runs first.
        """
        state, cause = self._state, f"{type(error).__name__}: {error}"
        if (why := self.faults.record(cause)) is not None:
            self.fail(why)
            return
        live = (state.table[name] for name in state.table)
        self.faults.blame(live, state.scheduler.credited, cause)
        self.restart()

    def read_canary(self, canary: Canary, plan: Plan, result: StepResult) -> None:
        """The device has answered a step without a request; behind the last one, end the request that it ran for."""
        canary.commit(plan, result)
        self._state.last_answer = self._state.clock()
        self.faults.plan = None
        self._state.turn.torn = False
        if not canary.is_over or (accused := self.faults.canary_lived()) is None:
            return
        self.restart()
        name = accused.sequence.request_id
        if not accused.sequence.finished:
            self._state.scheduler.finish(name, FinishReason.ERROR)
            message = f"a step failed again with this request alone in it: {accused.cause}"
            engine_log.warning("request %r ends: it was alone in a failed step", name)
            self._delivery.end(name, FinishReason.ERROR, message)

    def release_suspects(self) -> None:
        """Let the next ones run when those that run apart are past the step that failed."""
        if self.faults.passed(self._state.scheduler.credited):
            self.restart()
            self._state.turn.torn = True  # an interrupt may come before the turn's own step is started

    def restart_if_torn(self) -> None:
        """Start afresh after an interrupt in the middle of a turn, which leaves unknown what was done."""
        turn = self._state.turn
        if turn.torn and not turn.running and self._state.closed is None:
            self.faults.plan = None
            self.restart()

    def restart(self) -> None:
        """Run every live request again from its beginning, with state made anew on the device.

        Law 1 makes this exact: a request gets the tokens it already has once more, which are not delivered again, and
        goes on.
        """
        state, table = self._state, self._state.table
        accused = self.faults.accused is not None
        self.canary = Canary(state.scheduler.config, pools=table.pools) if accused else None
        state.pipeline.restart(self.faults.only, list(table))
        for name in table:
            table[name].rewind()
        table.token_buffer.clear()
        if state.speculator is not None:
            state.speculator.restart()
        if state.shadow is not None:
            state.shadow.restart()
        try:
            state.runner.rebuild()
        except Exception as error:
            self.fail(f"the device state was lost and cannot be made again: {type(error).__name__}: {error}")
        state.turn.torn = False

    def fail(self, cause: str) -> None:
        """Close the engine for a cause: every request ends with reason `error`, and later submits fail at once."""
        state = self._state
        state.closed = cause
        engine_log.error("the engine is closed, and %d sequences end: %s", len(state.table), cause)
        state.pipeline.in_flight.clear()
        for name in state.table:
            state.scheduler.finish(name, FinishReason.ERROR)
            self._delivery.end(name, FinishReason.ERROR, cause)
        for name in list(state.pending):
            self._delivery.end_pending(name, FinishReason.ERROR, cause)
