"""Recovery from a failed step, and from an interrupt in the middle of a turn.

Finds the request that makes steps fail, and decides when the engine closes.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xla_engine.engine.delivery import Delivery
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.state import EngineState
from xla_engine.observability.log import engine_log
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import (
    Chunk,
    FinishReason,
    Plan,
    Request,
    Row,
    Scheduler,
    SchedulerConfig,
    StepResult,
    Swap,
    VerifyRow,
)

FAULTS_SURVIVED = 1  # failed steps that do not make a request a suspect
FAULTS_IN_A_ROW = 16  # consecutive failed steps after which the engine closes if the canary fails, too
PASSES = 3  # times that a suspect may get past its failed step; if it fails again, it runs apart to its end
_NAME = "canary"  # the request's id, in plans that the engine's scheduler does not see


class Canary:
    """A prompt of one token; prefill samples the first token and decode the second, on a device with blank state.

    settings: its row settings, for the runner.
    """

    def __init__(self, config: SchedulerConfig, *, pools: bool) -> None:
        """config: that of the engine's scheduler. pools: whether the model pools prompts and does not decode."""
        limits = {
            name: getattr(config, name)
            for name in ("max_num_seqs", "chunk_size", "max_num_batched_tokens", "block_size", "num_blocks")
        }
        params = PoolingParams() if pools else SamplingParams(temperature=0.0, max_tokens=2)
        tokens = params.token_limit
        self.settings = {_NAME: RowSettings(max_tokens=tokens, stop_token_ids=(), params=params, seed=0)}
        self._scheduler = Scheduler(SchedulerConfig(**limits))
        self._scheduler.submit(Request(request_id=_NAME, prompt_token_ids=(0,), max_tokens=tokens))

    def plan(self) -> Plan:
        """Plan its next step; the previous one must have been committed."""
        return self._scheduler.plan()

    def commit(self, plan: Plan, result: StepResult) -> None:
        self._scheduler.commit(plan, result)

    @property
    def is_over(self) -> bool:
        """Whether all its steps have been committed."""
        return not self._scheduler.has_unfinished


class Accused(NamedTuple):
    """A request that was alone in a failed step, and the step's error."""

    sequence: LiveSequence
    cause: str


class Faults:
    """Counts the failed steps of an engine, and searches for the requests that make steps fail.

    After a first failed step, all its requests run again. Requests that were in a second one are suspects. They run
    apart from all others, one half after the other, and a half that fails is halved again. A request that was alone in
    a failed step is accused. Then the canary, a request of the engine's own, runs alone on the device. If it succeeds,
    the accused request ends with an error, and the others run again with the same bits (law 1). If it fails, the
    device is at fault.

    Why this ends all faulty requests and no others, however many there are:

    - A request ends only if it was alone in a failed step and the canary then succeeded. Unless the device is at
      fault, a good request is never alone in a failed step, whatever the order.
    - Each failed step halves the group that was in it. After at most 2 + log2(slots) failed steps, either a step
      succeeds or one request is accused. The engine does not close as long as the canary succeeds in between.
    - A faulty request is in every step that it makes fail and cannot get past them, so in the end it is accused.

    Why the engine closes if the device fails every step: after 2 + log2(slots) steps some request is accused, the
    canary fails from then on, and after `FAULTS_IN_A_ROW` failed steps the engine closes. If turns fail outside of any
    step, the host is at fault, which the canary cannot find out: the engine closes after `FAULTS_IN_A_ROW` of them.

    plan: the plan that is being started or read. count: failed turns so far. last: the latest error.
    accused: a request that was alone in a failed step, until the canary has succeeded.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.last: str | None = None
        self.accused: Accused | None = None
        self._in_a_row = 0
        self._outside = 0  # turns in a row that failed outside of any step
        # Suspects. The last group runs; the others wait.
        self._groups: list[list[LiveSequence]] = []
        # By suspect: its tokens when its step failed. It has passed that step once it has more.
        self._reached: dict[LiveSequence, float] = {}

    def step_was_good(self) -> None:
        self.plan = None
        if self._in_a_row:
            engine_log.info("recovered: a step succeeded after %d failed steps", self._in_a_row)
            self._in_a_row = self._outside = 0

    def canary_lived(self) -> Accused | None:
        """Note that the canary succeeded; returns the accused request, which must end."""
        accused, self.accused, self.plan = self.accused, None, None
        self._in_a_row = 0
        return accused

    def record(self, cause: str) -> str | None:
        """Note a failed turn; returns why the engine must close, None if it can continue."""
        self.last = cause
        self.count += 1
        self._in_a_row += 1
        step = "a turn" if self.plan is None else f"step {self.plan.step}"
        if self.accused is not None:
            step = "the canary"
        engine_log.warning("%s failed (%d in a row): %s", step, self._in_a_row, cause)
        if self.plan is None:
            self._outside += 1
        if self._outside >= FAULTS_IN_A_ROW:
            return f"{self._outside} turns failed in a row outside of a step, the last with {cause}"
        if self.accused is not None and self._in_a_row >= FAULTS_IN_A_ROW:
            return f"{self._in_a_row} steps failed in a row, the last one without any request: {cause}"
        return None

    @property
    def only(self) -> frozenset[str] | None:
        """The requests that may run now; None if all may."""
        return frozenset(one.request_id for one in self._groups[-1]) if self._groups else None

    def blame(self, live: Iterable[LiveSequence], tokens: Callable[[str], int | None], cause: str) -> None:
        """Make the live requests of the failed step suspects, or accuse a request that was alone in it.

        tokens: returns how many tokens a request got since it last started; None if it is not live.
        """
        if self.accused is not None:
            self.plan = None  # it was the canary's plan
            return
        hit, alone = self._in_step({one.request_id: one for one in live})
        for one in hit:
            one.faults += 1
            self._reached[one] = math.inf if one.passes >= PASSES else tokens(one.request_id) or 0
        suspects = [one for one in hit if one.faults > FAULTS_SURVIVED]
        if self._groups:
            suspects = hit
            if others := [one for one in self._groups.pop() if one not in hit]:
                self._groups.append(others)
        if alone and suspects and hit[0].faults > FAULTS_SURVIVED:
            self.accused = Accused(hit[0], cause)
            return
        half = (len(suspects) + 1) // 2
        self._groups += [group for group in (suspects[half:], suspects[:half]) if group]

    def passed(self, tokens: Callable[[str], int | None]) -> bool:
        """Whether all requests that run apart have passed the step that failed; if so, the next group may run."""
        if not self._groups or self.accused is not None:
            return False
        group = self._groups[-1]
        if any(not one.finished and (tokens(one.request_id) or 0) <= self._reached[one] for one in group):
            return False
        for one in self._groups.pop():
            one.passes += 1
        if not self._groups:
            self._reached.clear()
        return True

    def _in_step(self, live: dict[str, LiveSequence]) -> tuple[list[LiveSequence], bool]:
        """The live requests of the failed step, prompts first, and whether it had only one request, live or not.

        If no plan was made: all requests that may run.
        """
        plan, only, self.plan = self.plan, self.only, None
        if plan is None:
            names = [name for name in live if only is None or name in only]
        else:
            parts: tuple[Chunk | Row | VerifyRow | Swap, ...]
            parts = (*plan.chunks, *plan.decode, *plan.verify, *plan.moves.parks, *plan.moves.resumes)
            names = list(dict.fromkeys(part.request_id for part in parts))
        return [live[name] for name in names if name in live], len(names) == 1


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
        if state.hosts is not None and state.hosts.why_lost() is not None:
            self.device_lost(cause)
            return
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
        self._state.turn.incomplete = False
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
            self._state.turn.incomplete = True  # `restart` cleared it, but this turn is still in progress

    def restart_if_incomplete(self) -> None:
        """Restart if an interrupt came in the middle of a turn, because the state is then unknown."""
        turn = self._state.turn
        if turn.incomplete and not turn.running and self._state.closed is None:
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
        state.turn.incomplete = False

    def device_lost(self, cause: str) -> None:
        """Close the engine, whose device is gone, or another host that shares the model."""
        hosts = self._state.hosts
        self._state.device_lost = True
        self.fail(cause if hosts is None or hosts.lost is None else hosts.lost)

    def fail(self, cause: str) -> None:
        """As `XlaBatchEngine.fail`."""
        state = self._state
        state.closed = cause
        engine_log.error("the engine has closed and ended %d sequences: %s", len(state.table), cause)
        state.pipeline.in_flight.clear()
        for name in state.table:
            state.scheduler.finish(name, FinishReason.ERROR)
            self._delivery.end(name, FinishReason.ERROR, cause)
        for name in list(state.table.pending):
            self._delivery.end_pending(name, FinishReason.ERROR, cause)
