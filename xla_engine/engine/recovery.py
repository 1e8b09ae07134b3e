"""Recovery from a failed step, and from an interrupt in the middle of a turn."""

from xla_engine.engine.canary import Canary
from xla_engine.engine.delivery import Delivery
from xla_engine.engine.faults import Faults
from xla_engine.engine.state import EngineState
from xla_engine.observability.log import engine_log
from xla_engine.scheduler import FinishReason, Plan, StepResult


class Recovery:
    """Runs live requests again after a fault, and finds the request that causes it.

    Law 1 makes this exact: a request that runs again gets the same tokens.

    canary: runs alone on the device after a request has failed alone; None otherwise.
    """

    def __init__(self, state: EngineState, delivery: Delivery) -> None:
        self.faults = Faults()
        self.canary: Canary | None = None
        self._state = state
        self._delivery = delivery

    def after(self, error: Exception) -> None:
        """Handle a failed turn: restart, with all live requests or, apart from the others, with a group of suspects.

        After a request has failed alone, the canary runs first.
        """
        state, cause = self._state, f"{type(error).__name__}: {error}"
        if (why := self.faults.record(cause)) is not None:
            self.fail(why)
            return
        live = (state.table[name] for name in state.table)
        self.faults.blame(live, state.scheduler.credited, cause)
        self.restart()

    def read_canary(self, canary: Canary, plan: Plan, result: StepResult) -> None:
        """Commit a step of the canary; after its last step, end the accused request."""
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
            message = f"a step failed again with this request alone: {accused.cause}"
            engine_log.warning("request %r ends with an error: a step failed with this request alone", name)
            self._delivery.end(name, FinishReason.ERROR, message)

    def release_suspects(self) -> None:
        """Once the suspects that run apart have passed the step that failed, let the next group run."""
        if self.faults.passed(self._state.scheduler.credited):
            self.restart()
            self._state.turn.torn = True  # `restart` cleared it, but this turn is still in progress

    def restart_if_torn(self) -> None:
        """Restart if an interrupt came in the middle of a turn, because the state is then unknown."""
        turn = self._state.turn
        if turn.torn and not turn.running and self._state.closed is None:
            self.faults.plan = None
            self.restart()

    def restart(self) -> None:
        """Run every live request again from its beginning, on new device state.

        Law 1 makes this exact: a request first samples the tokens it already has, which are not delivered again.
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
        if state.prefixes is not None:
            state.prefixes.restarted()
        try:
            state.runner.rebuild()
        except Exception as error:
            self.fail(f"the device state was lost and cannot be rebuilt: {type(error).__name__}: {error}")
        state.turn.torn = False

    def fail(self, cause: str) -> None:
        """As `XlaBatchEngine.fail`."""
        state = self._state
        state.closed = cause
        engine_log.error("the engine has closed and ended %d sequences: %s", len(state.table), cause)
        state.pipeline.in_flight.clear()
        for name in state.table:
            state.scheduler.finish(name, FinishReason.ERROR)
            self._delivery.end(name, FinishReason.ERROR, cause)
        for name in list(state.pending):
            self._delivery.end_pending(name, FinishReason.ERROR, cause)
