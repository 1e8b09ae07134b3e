"""The loop: takes requests through scheduler and device, turn by turn.

One turn is `plan -> start -> wait for an earlier step -> commit -> deliver`. The queue of steps in flight holds the
lag between start and read. While a turn waits for the device, the lock is free, so any thread may submit or abort
requests.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

from xla_engine.engine.delivery import Delivery
from xla_engine.engine.intake import Intake
from xla_engine.engine.recovery import Canary, Recovery
from xla_engine.engine.state import EngineState
from xla_engine.engine.turn import Turn, Wait
from xla_engine.errors import DeviceLostError, EngineClosedError
from xla_engine.observability.log import LOG_STEPS, engine_log
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.inputs import Draft
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Plan, StepResult
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT


class Loop:
    """Drives a scheduler and a runner.

    log_progress: called every `LOG_STEPS` steps if the log level is INFO or below.
    """

    def __init__(
        self,
        state: EngineState,
        delivery: Delivery,
        recovery: Recovery,
        intake: Intake,
    ) -> None:
        self.log_progress: Callable[[], None] = lambda: None
        self._state = state
        self._delivery = delivery
        self._recovery = recovery
        self._intake = intake

    def turn(self) -> Turn:
        """One turn. Raises EngineClosedError, and RuntimeError while another turn runs.

        If nothing can run until background work (a constraint, a mask) is done, the turn waits for that.

        The caller may close the generator or throw an interrupt (a BaseException that is no Exception) into it. An
        interrupt is raised again, and the next turn runs all requests from their beginning.
        """
        state = self._state
        with state.lock:
            if state.awaits_background:
                left = state.next_deadline() - state.clock()
                call: Callable[[], Any] = partial(
                    state.ready.wait, None if left == math.inf else max(left, 1e-3)
                )
                step, until = None, partial(float, math.inf)
            elif (step := self._begin()) is None:
                return
            else:
                call, until = partial(state.runner.wait, step), partial(self._time_left, state.clock())
        if step is None:
            yield Wait(call, until, self.expire)
            return
        try:
            answer = yield Wait(call, until, self.expire)
        except BaseException as error:
            answer = error
        self._end(step, answer)

    def _begin(self) -> InFlight | None:
        """Expire, plan and start; returns the step to read now, or None if the turn is over."""
        state, turn, pipeline = self._state, self._state.turn, self._state.pipeline
        timer, step = state.timer, None
        state.waiter.check_process()
        if state.closed is not None:
            raise EngineClosedError(f"the engine is closed ({state.closed}); make a new one")
        if turn.running:
            raise RuntimeError("two callers run this engine at the same time; let only one of them run it")
        if timer is not None:
            timer.begin()
        self._recovery.restart_if_incomplete()
        self._intake.queue_compiled()
        if state.closed is not None:  # a restart failed and has ended all requests
            if timer is not None:
                timer.planned(is_over=True, has_work=False)
            return None
        turn.running = turn.incomplete = True
        turn.thread = get_ident()
        try:
            if not pipeline.in_flight:
                state.last_answer = state.clock()
            self._delivery.expire()
            self._recovery.release_suspects()
            # A turn reads a step even if it started none, or if `lag` was lowered.
            started = not pipeline.is_full and self._start_next()
            if (step := pipeline.due(started=started)) is None:
                turn.incomplete = False
            else:
                self._recovery.faults.plan = step.plan
        except DeviceLostError as error:
            self._recovery.device_lost(str(error))
        except Exception as error:
            self._recovery.after(error)
        finally:
            turn.running = step is not None
            state.idle = step is None and not pipeline.in_flight
            if timer is not None:
                timer.planned(is_over=step is None, has_work=state.has_work)
        return step

    def _end(self, step: InFlight, answer: StepResult | BaseException) -> None:
        """Commit and deliver the result of a step, or recover from its error."""
        state, recovery, timer = self._state, self._recovery, self._state.timer
        with state.lock:
            if timer is not None:
                timer.answered()
            try:
                if isinstance(answer, BaseException):
                    raise answer
                if recovery.canary is not None:
                    recovery.read_canary(recovery.canary, step.plan, answer)
                    return
                for part in state.runner.prompt_scores(step):
                    state.table.add_of_prompt(part)
                events = state.scheduler.commit(step.plan, answer)
                if state.speculator is not None:
                    state.speculator.read(step.plan, answer)
                if state.prefixes is not None:
                    state.prefixes.read(step.plan, state.clock())
                recovery.faults.step_was_good()
                state.observers.read(step.plan, events)
                if timer is not None:
                    timer.committed(step.plan.step)
                self._delivery.deliver(step.plan, answer, events)
                state.turn.incomplete = False
            except DeviceLostError as error:
                recovery.device_lost(str(error))
            except Exception as error:
                recovery.after(error)
            finally:
                state.turn.running, state.turn.under_way = False, None
                state.turn.ended += 1
                state.lock.notify_all()
                if timer is not None:
                    timer.ended(has_work=state.has_work)

    def _start_next(self) -> bool:
        """Plan and start one step; False if there is nothing to start."""
        state, table, speculator = self._state, self._state.table, self._state.speculator
        if self._recovery.canary is not None:
            return self._start_canary(self._recovery.canary)
        blocked = self._delivery.blocked()
        wanted = None if speculator is None else speculator.wanted(state.scheduler)
        prefixes = state.prefixes
        if prefixes is not None:
            prefixes.advance(state.scheduler, state.clock())
        plan = state.pipeline.plan(wanted, blocked)
        if prefixes is not None:
            prefixes.advance(state.scheduler, state.clock())
        if plan is None:
            if table and not state.pipeline.in_flight and not blocked and not state.reads:
                raise RuntimeError("requests are left, but the scheduler plans no work for them")
            return False
        self._recovery.faults.plan = plan
        for name in plan.moves.replays:  # before the start, which reads the mask for their first token
            table[name].rewind()
        for decision in plan.decisions:
            if decision.action in WAYS_TO_PREEMPT:
                table[decision.request_id].preemptions += 1
        self._start(plan, table.settings, None if speculator is None else speculator.drafts(plan))
        state.observers.started(plan)
        for reuse in plan.moves.reuses:
            table[reuse.request_id].reuse(reuse.length)
        now = state.clock()
        if prefixes is not None:
            prefixes.started(plan, now)
        for name in plan.admitted:
            table[name].admit(now)
        state.work.started(plan, table.histograms, state.scheduler.blocks_used)
        if state.shadow is not None:
            state.shadow.step()
        if not state.work.steps % LOG_STEPS and engine_log.isEnabledFor(logging.INFO):
            self.log_progress()
        return True

    def _start_canary(self, canary: Canary) -> bool:
        """Start the canary's next step, unless one is in flight."""
        if self._state.pipeline.in_flight:
            return False
        self._recovery.faults.plan = plan = canary.plan()
        self._start(plan, canary.settings, None)
        return True

    def _start(
        self, plan: Plan, settings: Mapping[str, RowSettings], drafts: Mapping[str, Draft] | None
    ) -> None:
        """Start a step on the device. Raises DeviceLostError if that takes longer than `step_timeout_s`."""
        state, timer = self._state, self._state.timer
        start = partial(state.runner.start, plan, settings, *(() if drafts is None else (drafts,)))
        if timer is not None:
            timer.dispatches()
        try:
            if state.step_timeout_s is None:
                step = start()
            else:  # the start itself may hang
                step = state.waiter.run(start, partial(self._time_left, state.clock()))
        finally:
            if timer is not None:
                timer.dispatched(plan.step)
        state.pipeline.in_flight.append(step)
        self._recovery.faults.plan = None

    def _time_left(self, began: float) -> float:
        with self._state.lock:
            return self._state.time_left(began)

    def expire(self) -> None:
        """End the requests whose deadline has passed, even while a turn waits."""
        with self._state.lock:
            self._delivery.expire()
