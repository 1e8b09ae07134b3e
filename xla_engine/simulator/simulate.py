"""The engine's loop around the real scheduler, with a cost model in place of a device.

A turn is the engine's: `plan -> start -> read the step before -> commit`. Nothing is sampled; each request gets the
number of tokens its trace says. Memory is bounded by the requests that are live at one time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from xla_engine.scheduler import Events, FinishReason, Plan, Request, Row, Scheduler, SchedulerConfig
from xla_engine.scheduler.fast_forward import next_deadline, skip, steady_steps
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.simulator.clock import Clock
from xla_engine.simulator.cost import DeviceWork, HostWork, Machine
from xla_engine.simulator.report import REFUSED, Report
from xla_engine.simulator.stops import STOPS, StopTokens
from xla_engine.simulator.trace import Arrival, distinct
from xla_engine.tracing.step_log import Moment
from xla_engine.tracing.step_log_writer import StepLogWriter


@dataclass(slots=True)
class _Live:
    """A live request.

    came: when it arrived. had_token: whether it has one.
    last_token: when its latest token came; kept only for requests that do not get one in every step.
    away: whether it lost its slot and had no token since.
    back: the step from which it has a slot again, None while it waits.
    """

    arrival: Arrival
    came: float
    had_token: bool = False
    last_token: float = 0.0
    away: bool = False
    back: int | None = None


class Simulation:
    """Runs a trace through a scheduler of its own.

    machine: the programs that steps are made of.
    lag: as in `EngineConfig`.
    log: takes every step; none is skipped then.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        machine: Machine,
        clock: Clock,
        *,
        lag: int = 1,
        log: StepLogWriter | None = None,
    ) -> None:
        self.report = Report(config=config)
        self.plans: list[Plan] | None = None  # set to a list to keep them
        self.reads: list[int] = []  # with `plans`: how many steps were started when each was read
        self._scheduler = Scheduler(config)
        self._machine = machine
        self._clock = clock
        self._lag = lag
        self._log = log
        self._live: dict[str, _Live] = {}
        self._in_flight: deque[Plan] = deque()
        self._irregular = 0  # live requests that do not get a token in every step
        self._stops = StopTokens(config.max_num_seqs, apart=config.keeps_tokens)
        self._gives_up: list[tuple[Moment, str, str]] = []  # heap of (when, request, reason)
        self._next_step = 0
        self._last_read = 0.0
        # Keys: a row holds `base + step` in a step. Of the rows of the latest decode tuple:
        self._base: dict[str, int] = {}  # by request
        self._rows: tuple[Row, ...] = ()
        self._total_base = self._longest_base = 0
        # Host work since the latest step was started.
        self._tokens = self._ended = self._woken = 0

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Run until every request has ended. Raises ValueError for a request that cannot be."""
        coming = iter(arrivals)
        ahead = next(coming, None)
        while ahead is not None or self._scheduler.has_unfinished or self._in_flight:
            idle = not (self._scheduler.has_unfinished or self._in_flight)
            while ahead is not None and self._is_due(ahead, idle):
                self._submit(ahead)
                idle, ahead = False, next(coming, None)
            if not self._skip(ahead):
                self._turn()
        self.report.wall = self._last_read
        self.report.steps = self._next_step
        counters = self._scheduler.snapshot().counters
        self.report.new_tokens, self.report.preemptions = counters.tokens_credited, counters.preemptions
        return self.report

    def _is_due(self, arrival: Arrival, idle: bool) -> bool:
        clock = self._clock
        if idle:
            if clock.wait(arrival.time):
                self._tokens = self._ended = 0  # that is done by now
                self._woken = 1
            return True
        if arrival.moment is None:
            return arrival.time <= clock.now
        return self._is_over(arrival.moment)

    def _is_over(self, moment: Moment) -> bool:
        return moment.started <= self._next_step and moment.read <= self._next_step - len(self._in_flight)

    def _submit(self, arrival: Arrival) -> None:
        self.report.requests += 1
        if self._scheduler.never_fits(arrival.prompt_tokens, arrival.max_tokens) is not None:
            self.report.finished[REFUSED] = self.report.finished.get(REFUSED, 0) + 1
            return
        self._clock.submit()
        # Recorded arrivals come when the loop gets to them; timed ones have waited since their time.
        came = self._clock.now if arrival.moment is not None else arrival.time
        prompt = arrival.prompt
        if prompt is None:
            prompt = distinct(self.report.requests, arrival.prompt_tokens)
        request = Request(
            request_id=arrival.name,
            prompt_token_ids=prompt,
            max_tokens=arrival.max_tokens,
            stop_token_ids=STOPS,
            host_gated=arrival.host_gated,
            reads_prefix_cache=arrival.reads_prefix_cache,
            priority=arrival.priority,
            deadline=None if arrival.deadline is None else came + arrival.deadline,
        )
        self._scheduler.submit(request)
        self._live[arrival.name] = _Live(arrival, came)
        self._stops.submit(self.report.requests, arrival)
        self._irregular += arrival.host_gated
        if arrival.gives_up is not None:
            heapq.heappush(self._gives_up, (arrival.gives_up[0], arrival.name, arrival.gives_up[1]))
        if self._log is not None:
            self._log.submitted(request, self._clock.now, arrival.custom_id)

    def _turn(self) -> None:
        scheduler = self._scheduler
        for name, reason in scheduler.expire(self._clock.now):
            self._end(name, reason)
        self._take_back()
        plan = scheduler.plan()
        self.report.most_waiting = max(self.report.most_waiting, scheduler.num_waiting)
        started = not plan.is_empty
        if started:
            self._start(plan)
        while len(self._in_flight) > (self._lag if started else 0):
            self._take_back()  # a request may have been taken back while the host waited
            self._read()
            started = True

    def _take_back(self) -> None:
        while self._gives_up and self._is_over(self._gives_up[0][0]):
            _, name, given = heapq.heappop(self._gives_up)
            if self._scheduler.finish(name, FinishReason(given)):
                self._end(name, FinishReason(given))

    def _start(self, plan: Plan) -> None:
        report, clock = self.report, self._clock
        for decision in plan.decisions:
            if decision.action in WAYS_TO_PREEMPT:
                self._lose_slot(decision.request_id, plan.step)
        for name in plan.admitted:
            if not self._live[name].away:
                report.queued.add(clock.now - self._live[name].came)
        ends = []
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            ends.append(end)
            if chunk.is_last:
                self._begin(chunk.request_id, plan.step, keys=end + 1, sampled=chunk.generated + 1)
        for swap in plan.resumes:
            prompt = self._live[swap.request_id].arrival.prompt_tokens
            self._begin(swap.request_id, plan.step, keys=swap.length + 1, sampled=swap.length - prompt + 1)
        prompt_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        report.prompt_tokens += prompt_tokens
        if plan.decode is not self._rows:
            self._rows = plan.decode
            bases = [self._base[row.request_id] for row in plan.decode]
            self._total_base, self._longest_base = sum(bases), max(bases, default=0)
        rows = len(plan.decode)
        report.decode_steps += rows > 0
        report.row_steps += rows
        work = DeviceWork(
            calls=self._machine.calls(len(ends)) if ends else (),
            prefill_keys=self._machine.prefill_keys(ends) if ends else 0,
            rows=rows,
            keys=self._keys(plan.step) if rows else 0,
            moved=sum(swap.length for swap in (*plan.parks, *plan.resumes)),
            prompt_tokens=prompt_tokens,
        )
        clock.start(self._take_host_work(len(work.calls)), work)
        self._in_flight.append(plan)
        self._next_step = plan.step + 1
        if self._log is not None:
            self._log.started(plan, clock.now)
        if self.plans is not None:
            self.plans.append(plan)

    def _begin(self, name: str, step: int, *, keys: int, sampled: int) -> None:
        """Let a request decode from `step` on, in which it reads `keys` keys; it has `sampled` tokens before."""
        self._live[name].back = step
        self._base[name] = keys - step
        self._stops.begin(name, step, sampled)

    def _lose_slot(self, name: str, step: int) -> None:
        """Take a request's slot: it does not decode from `step` on."""
        self._stops.lose_slot(name, step)
        live = self._live[name]
        live.back = None
        if not live.away and live.had_token:
            live.away, live.last_token = True, self._last_read
            self._irregular += 1

    def _keys(self, step: int) -> int:
        rows = len(self._rows)
        return self._machine.decode_keys(self._total_base + rows * step, self._longest_base + step)

    def _take_host_work(self, calls: int) -> HostWork:
        work = HostWork(self._tokens, self._ended, calls, self._woken)
        self._tokens = self._ended = self._woken = 0
        return work

    def _read(self) -> None:
        plan = self._in_flight.popleft()
        now = self._clock.read()
        if self.plans is not None:
            self.reads.append(self._next_step)
        events = self._scheduler.commit(plan, self._stops.result(plan))
        if self._log is not None:
            self._log.read(plan, events, now)
        self._credit(plan, events, now)
        self._last_read = now

    def _credit(self, plan: Plan, events: Events, now: float) -> None:
        """Count the intervals between tokens. A row's first token and second come out of the same step."""
        report = self.report
        apart = len(events)  # tokens that came one read after the one before
        if plan.chunks or self._irregular:
            fresh = {chunk.request_id for chunk in plan.first_rows}
            for name, _, _ in events:
                live = self._live[name]
                if not live.had_token:
                    live.had_token = True
                    report.first_token.add(now - live.came)
                elif live.away and (live.back is None or plan.step < live.back):
                    live.last_token = now  # it was in flight when the slot was lost
                    continue
                elif live.away or name in fresh or live.arrival.host_gated:
                    report.inter_token.add(now - live.last_token)
                    self._irregular -= live.away
                    live.away = False
                else:
                    continue
                live.last_token = now
                apart -= 1
        if apart:
            report.inter_token.add(now - self._last_read, apart)
        self._tokens += len(events)
        for name, _, reason in (*events.first, *events.ended):
            if reason is not None:
                self._end(name, reason)

    def _skip(self, ahead: Arrival | None) -> bool:
        """Pass over turns that only decode the same rows, with the same result as taking them one by one.

        Returns whether there were any.
        """
        rows, step = self._rows, self._next_step
        if self._log is not None or self.plans is not None or len(self._in_flight) != self._lag or not rows:
            return False
        if any(plan.chunks or plan.resumes or plan.decode is not rows for plan in self._in_flight):
            return False
        steps = steady_steps(self._scheduler, rows)
        until = next_deadline(self._scheduler)
        if (stop := self._stops.next_step) is not None:
            steps = min(steps, stop - (step - self._lag))
        if self._gives_up:
            moment = self._gives_up[0][0]
            steps = min(steps, moment.started - step, moment.read - (step - self._lag))
        if ahead is not None and ahead.moment is not None:
            steps = min(steps, ahead.moment.started - step)
        elif ahead is not None:
            until = min(until, ahead.time)
        steps = min(steps, self._machine.steps_alike(self._longest_base + step))
        if steps < 2 or self._clock.now >= until:
            return False
        cost, keys = self._clock.cost, self._keys(step)
        reads = self._clock.steady(
            steps,
            until,
            first_host=cost.host(self._take_host_work(0)),
            host=cost.host(HostWork(tokens=len(rows))),
            device=cost.device(DeviceWork(rows=len(rows), keys=keys)),
            growth=cost.key * (self._keys(step + 1) - keys),
        )
        for now in reads:
            self.report.inter_token.add(now - self._last_read, len(rows))
            self._last_read = now
        taken, report = len(reads), self.report
        skip(self._scheduler, taken)
        self._next_step += taken
        self._in_flight = deque(replace(plan, step=plan.step + taken) for plan in self._in_flight)
        self._tokens = len(rows)
        report.most_waiting = max(report.most_waiting, self._scheduler.num_waiting)
        report.skipped += taken
        report.decode_steps += taken
        report.row_steps += taken * len(rows)
        return True

    def _end(self, name: str, reason: FinishReason) -> None:
        live = self._live.pop(name)
        self._stops.end(name)
        self._irregular -= live.arrival.host_gated + live.away
        self._base.pop(name, None)
        self.report.finished[str(reason)] = self.report.finished.get(str(reason), 0) + 1
        self._ended += 1
        if live.had_token:
            self.report.whole.add(self._clock.now - live.came)
        if self._log is not None:
            self._log.ended(name, reason, self._clock.now)
