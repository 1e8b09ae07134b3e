"""The loop: requests go through scheduler and device, turn by turn.

One turn is `plan -> start -> wait(previous) -> commit -> deliver`: `begin_turn` plans and starts, its caller waits,
and `end_turn` commits and delivers. The lag between starting a step and reading it is a value, the queue of steps in
flight. Several threads may share a loop: one of them runs a turn, and `lock` is free while it waits for the device.
Where a step has a time limit, a thread of its own waits for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Condition, get_ident

from xla_engine.engine.faults import Faults
from xla_engine.engine.locked import locked
from xla_engine.engine.recovery import Recovery
from xla_engine.engine.requests.masks import MaskMaker
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation import Speculator
from xla_engine.engine.waiter import StepRunner, Waiter
from xla_engine.errors import DeviceGoneError, EngineClosedError, InvalidRequestError
from xla_engine.observability.stats import WorkCounters
from xla_engine.runner.in_flight import InFlight
from xla_engine.scheduler import Events, FinishReason, Plan, Request, Scheduler, StepResult
from xla_engine.scheduler.fast_forward import next_deadline
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.scheduler.user_policy import PolicyError


class Loop(Recovery):
    """Drives a scheduler and a runner; a table holds what requests have so far.

    lag: started steps that may be left unread; may be changed between turns.
    lock: held by whatever reads or changes the state of requests; told of the end of each turn.
    step_timeout_s: seconds that a step may take to be started, and to be read, before the device is given up; None for
        no limit.
    clock: seconds, for deadlines and the times of tokens.
    on_step: called with each plan as it is started (events None) and each step as it is read.
    on_submit, on_end: called for each sequence as it is queued, and as it ends.
    masks: makes those of host-gated rows.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner, table: RequestTable, *, lag: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.lag = lag
        self.lock = Condition()
        self.step_timeout_s: float | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.on_step: Callable[[Plan, Events | None], None] | None = None
        self.on_submit: Callable[[Request], None] | None = None
        self.on_end: Callable[[str, FinishReason], None] | None = None
        self._table = table
        self._faults = Faults()
        self._in_flight: deque[InFlight] = deque()
        self._turning = False  # between the beginning and the end of a turn
        self._driver = 0  # the thread that began the last turn
        self._turns = 0  # that came to their end
        self._unsettled = False  # a turn was begun and has not come to its end
        self._work = WorkCounters()
        self.masks = MaskMaker()
        self._speculator: Speculator | None = None
        self._shadow: ShadowProbe | None = None
        self._waiter = Waiter()
        self._heard = 0.0  # when the device answered last, or had nothing to do
        self._gone = False  # the device does not answer any more
        self._closed: str | None = None
        self._draining = False  # takes no more requests
        self._parks = False  # the state of a request can wait on the host

    def queue(
        self, request_id: str, sequences: Iterable[Request], submit: Callable[[Request], None] | None = None
    ) -> None:
        """Queue all sequences of a request of the table, or none: then the request leaves the table.

        submit: in place of `Scheduler.submit`, and raises what that does.
        """
        queued: list[str] = []
        try:
            for request in sequences:
                (submit or self.scheduler.submit)(request)
                if self.on_submit is not None:
                    self.on_submit(request)
                queued.append(request.request_id)
                if self._speculator is not None:
                    self._speculator.begin(request)
        except BaseException as error:
            for name in queued:
                self.scheduler.abort(name)
                if self._speculator is not None:
                    self._speculator.end(name)
            self._table.take_back(request_id)
            if isinstance(error, PolicyError):
                raise InvalidRequestError(str(error)) from error
            raise

    @locked
    def abort(self, request_id: str, cause: str | None = None) -> bool:
        """End a request now, keeping what it has; False when it is unknown or already over.

        cause: what its output says as `error`.
        """
        self._settle()
        ended = False
        for name in self._table.sequences(request_id):
            if self.scheduler.abort(name):
                ended = True
                self._end(name, FinishReason.ABORT, cause)
        return ended

    @locked
    def abort_all(self, cause: str | None = None) -> None:
        """End every live request now; `cause` as in `abort`."""
        for name in self._table:
            self.abort(name, cause)

    def stop_taking(self) -> None:
        """Refuse requests from now on; those that are here go on."""
        self._draining = True

    def _take_away(self, name: str, *, how: str | None, to_back: bool) -> bool:
        """Preempt a sequence; true if it held a slot."""
        if (action := self.scheduler.preempt(name, how=how, to_back=to_back)) is None:
            return False
        self._lost_slot(name, self.scheduler.counters().steps_planned)
        if action == "replay":  # the step being read may hold a token behind a first one that is dropped
            self._table[name].rewind()
        return True

    def _lost_slot(self, name: str, step: int) -> None:
        """A sequence was preempted before `step` was planned."""
        sequence = self._table[name]
        sequence.preemptions += 1
        self._table.token_buffer.bound(sequence, step)

    def advance(self) -> None:
        """One turn, whose news are left in the collectors. Raises EngineClosedError.

        While another thread runs a turn, wait for its end instead: its news may be the caller's.
        """
        with self.lock:
            turn = self._turns
            if self._turning and self._driver != get_ident():
                self.lock.wait_for(lambda: self._turns != turn)
                return
            step = self.begin_turn()
        if step is None:
            return
        try:
            answer: StepResult | BaseException
            try:
                wait, limit = partial(self.runner.wait, step), self.step_timeout_s
                answer = (
                    wait()
                    if limit is None
                    else self._waiter.watch(wait, self.time_left, self.clock(), self.expire)
                )
            except BaseException as error:
                answer = error
            self.end_turn(step, answer)
        finally:
            self._end_of_turn(turn)  # where an interrupt came between the two

    def _end_of_turn(self, turn: int) -> None:
        with self.lock:
            if self._turning and self._turns == turn:
                self._turning = False
                self._turns += 1
                self.lock.notify_all()

    @locked
    def time_left(self, began: float) -> float:
        """Seconds until a step that is waited for since `began` has had its time, or a request; 0 for the step."""
        now = self.clock()
        until = math.inf if self.step_timeout_s is None else began + self.step_timeout_s
        return 0 if now >= until else max(min(until, next_deadline(self.scheduler)) - now, 1e-3)

    @locked
    def expire(self) -> None:
        """End the requests whose time is up, also between the two halves of a turn."""
        for request_id, reason in self.scheduler.expire(self.clock()):
            self._end(request_id, reason)

    @locked
    def begin_turn(self) -> InFlight | None:
        """Expire, plan and start; the step to read now, None where the turn is over.

        A step is to be read with `runner.wait`, in any thread, and handed to `end_turn`. Requests may be submitted and
        aborted meanwhile. Raises EngineClosedError.
        """
        self._waiter.check_process()
        if self._closed is not None:
            raise EngineClosedError(f"the engine is closed ({self._closed}); make a new one")
        if self._turning:
            raise RuntimeError("two callers drive this engine at once; let one of them run it")
        self._settle()
        if self._closed is not None:
            return None  # every reader has been told
        self._turning = self._unsettled = True
        self._driver = get_ident()
        step: InFlight | None = None
        try:
            if not self._in_flight:
                self._heard = self.clock()
            self.expire()
            if self._faults.acquit(self.scheduler.credited):
                self._restart()
                self._unsettled = True  # an interrupt may come before the turn's own step is started
            # With nothing to start, and after `lag` was lowered, a turn reads a step all the same.
            started = len(self._in_flight) <= self.lag and self._start_next()
            if len(self._in_flight) > (self.lag if started else 0):
                step = self._in_flight.popleft()
                self._faults.plan = step.plan
            else:
                self._unsettled = False
        except DeviceGoneError as error:
            self._gone = True
            self.fail(str(error))
        except Exception as error:
            self._recover(f"{type(error).__name__}: {error}")
        finally:
            self._turning = step is not None
        return step

    @locked
    def end_turn(self, step: InFlight, answer: StepResult | BaseException) -> None:
        """Commit and deliver the result of a step, or recover from the error that came in its place.

        An interrupt (a BaseException that is no Exception) is raised again; the next call then starts afresh.
        """
        try:
            if isinstance(answer, BaseException):
                raise answer
            for part in self.runner.prompt_scores(step):
                self._table.add_of_prompt(part)
            events = self.scheduler.commit(step.plan, answer)
            if self._speculator is not None:
                self._speculator.read(step.plan, answer)
            self._faults.step_was_good()
            if self.on_step is not None:
                self.on_step(step.plan, events)
            self._deliver(step.plan, answer, events)
            self._unsettled = False
        except DeviceGoneError as error:
            self._gone = True
            self.fail(str(error))
        except Exception as error:
            self._recover(f"{type(error).__name__}: {error}")
        finally:
            self._end_of_turn(self._turns)

    def _start_next(self) -> bool:
        """Plan and dispatch one step; false when there is nothing to dispatch."""
        speculator, held = self._speculator, self._hold() if self.masks else frozenset()
        wanted = None if speculator is None else speculator.wanted(self.scheduler.decoding)
        plan = self.scheduler.plan(wanted, held)
        if plan.is_empty:
            if self._table and not self._in_flight and not held:
                raise RuntimeError("requests are left, but there is nothing to do for them")
            return False
        self._faults.plan = plan
        for request_id in plan.replays:  # before the start, which reads the mask of their first token
            self._table[request_id].rewind()
        for decision in plan.decisions:
            if decision.action in WAYS_TO_PREEMPT:
                self._lost_slot(decision.request_id, plan.step)
        for request_id in plan.to_speculate:
            self._table.token_buffer.bound(self._table[request_id], plan.step)
        guesses = () if speculator is None else (speculator.guesses(plan),)
        start = partial(self.runner.start, plan, self._table.settings, *guesses)
        self._in_flight.append(start() if self.step_timeout_s is None else self._start_in_time(start))
        self._faults.plan = None
        if self.on_step is not None:
            self.on_step(plan, None)
        for reuse in plan.reuses:
            self._table[reuse.request_id].reuse(reuse.length)
        now = self.clock()
        for request_id in plan.admitted:
            self._table[request_id].admit(now)
        self._begin_decoding(plan)
        self._work.started(plan, self._table.token_buffer.histograms, self.scheduler.blocks_used)
        if self._shadow is not None:
            self._shadow.step()
        return True

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses; None where rows sample one token a step."""
        return self._speculator

    @locked
    def finish_shadow(self) -> None:
        """Run again all requests that the shadow probe has drawn and not come to; the engine must be idle."""
        if self._shadow is not None:
            self._shadow.finish()

    def _start_in_time(self, start: Callable[[], InFlight]) -> InFlight:
        """Start a step that may hang before it runs. Raises DeviceGoneError when the time of a step is over."""
        answer = self._waiter.watch(start, self.time_left, self.clock(), lambda: None)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @locked
    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> bool:
        """Take a request's slot away: it goes on later, and its stream is the same; false where it holds no slot.

        how: "park" (its state waits on the host), "recompute" (prompt and tokens are prefilled again, where that gives
            the same bits), "replay" (it runs again from its beginning); None takes what is cheapest.
        to_back: it waits behind all others of its priority, else at the place it had.

        Raises InvalidRequestError for a way that this engine does not offer.
        """
        self._settle()
        if how not in (None, *self.ways_to_preempt):
            raise InvalidRequestError(
                f"this engine preempts by {', '.join(self.ways_to_preempt)}, not {how!r}"
            )
        names = self._table.sequences(request_id)
        return any([self._take_away(name, how=how, to_back=to_back) for name in names])

    @property
    def ways_to_preempt(self) -> tuple[str, ...]:
        """The values of `how` that `preempt` takes on this engine."""
        parks = ("park",) if self._parks else ()
        return (*parks, *(("recompute",) if self.scheduler.config.keeps_tokens else ()), "replay")

    @property
    def closed_because(self) -> str | None:
        """Why the engine takes nothing any more, None while it does."""
        return self._closed

    @property
    def last_fault(self) -> str | None:
        """The latest failed step, in words; None where none has failed."""
        return self._faults.last

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do."""
        return bool(self._table or self._in_flight)
