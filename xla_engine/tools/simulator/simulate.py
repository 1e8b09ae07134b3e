"""The engine's loop around the real scheduler, with a cost model in place of a device.

A turn is the engine's: `plan -> start -> read the step before -> commit`. Nothing is sampled; each request gets the
number of tokens its trace says. Memory is bounded by the requests that are live at one time.
"""

import bisect
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from xla_engine.observability.step_log import Moment, StepLog
from xla_engine.observability.step_log_writer import StepLogWriter
from xla_engine.scheduler import (
    Events,
    FinishReason,
    Plan,
    Request,
    Row,
    Scheduler,
    SchedulerConfig,
    Speculation,
    VerifyRow,
)
from xla_engine.scheduler.fast_forward import Steady, skip_commits, skip_plans, steady_plans
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.cost import DeviceWork, HostWork, Machine
from xla_engine.tools.simulator.report import REFUSED, SimulationReport
from xla_engine.tools.simulator.stops import STOPS, StopTokens
from xla_engine.tools.simulator.trace import Arrival, distinct


@dataclass(slots=True)
class _LiveRequest:
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
    """Runs a trace through a scheduler.

    machine: the programs that steps are made of.
    lag: as in `EngineConfig`.
    log: takes every step; none is skipped then.
    recorded: a run. If its rows sampled several tokens, these plans are made again, and rows get as many tokens as
        they got there. Rows sit out steps as they did, where their masks were not there.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        machine: Machine,
        clock: SimulatedClock,
        *,
        lag: int = 1,
        log: StepLogWriter | None = None,
        recorded: StepLog | None = None,
    ) -> None:
        self.report = SimulationReport(config=config)
        self.plans: list[Plan] | None = None  # set to a list to keep them
        self.reads: list[int] = []  # with `plans`: how many steps were started when each was read
        self._pipeline: StepPipeline[Plan] = StepPipeline(Scheduler(config), lag=lag)
        self._scheduler = self._pipeline.scheduler
        self._machine = machine
        self._clock = clock
        self._log = log
        self._live: dict[str, _LiveRequest] = {}
        self._irregular = 0  # running requests that do not get a token in every step
        speculated = None if recorded is None else recorded.speculated
        self._widths = None if speculated is None else [step.width for step in speculated]
        verified = None if speculated is None else [step.verified for step in speculated]
        self._stops = StopTokens(config.max_num_seqs, apart=config.keeps_tokens, verified=verified)
        self._recorded = recorded
        self._read_after = (
            [step.read_after for step in recorded.steps if step.read is not None] if recorded else []
        )
        self._gives_up: list[tuple[Moment, str, str]] = []  # heap of (when, request, reason)
        self._next_step = 0
        self._last_read = 0.0
        # Keys: a row holds `base + step` in a step. Of the rows of the latest decode tuple:
        self._base: dict[str, int] = {}  # by request
        self._rows: tuple[Row, ...] = ()
        self._total_base = self._longest_base = 0
        # Host work since the latest step was started.
        self._tokens = self._ended = self._woken = 0

    def run(self, arrivals: Iterable[Arrival]) -> SimulationReport:
        """Run until every request has ended. Raises ValueError for a request that can never run."""
        for arrival in arrivals:
            self.take(arrival)
        return self.finish()

    @property
    def live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def take(self, arrival: Arrival) -> None:
        """Run until a request is due, and accept it. Raises ValueError for one that can never run."""
        while not self._is_due(arrival, not self._is_busy):
            self._pass(arrival)
        self._submit(arrival)

    def run_until(self, ahead: Arrival | None) -> None:
        """Run until a request would be due, which another may take; None: until every request has ended."""
        while self._is_busy and (ahead is None or not self._is_due(ahead, False)):
            self._pass(ahead)

    def finish(self) -> SimulationReport:
        """Run until every request has ended."""
        self.run_until(None)
        self.report.wall = self._last_read
        self.report.steps = self._next_step
        counters = self._scheduler.snapshot().counters
        self.report.new_tokens, self.report.preemptions = counters.tokens_credited, counters.preemptions
        return self.report

    @property
    def _is_busy(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._pipeline.in_flight)

    def _pass(self, ahead: Arrival | None) -> None:
        if not self._skip(ahead):
            self._turn()

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

    def _submit(self, arrival: Arrival) -> None:
        self.report.requests += 1
        length = arrival.prompt_tokens + arrival.new_tokens
        self.report.longest = max(self.report.longest, length)
        self.report.beyond += length > self._machine.length
        if self._scheduler.never_fits(arrival.prompt_tokens, arrival.max_tokens) is not None:
            self.report.finished[REFUSED] += 1
            return
        self._clock.submit()
        # Recorded arrivals count from the turn that accepts them; timed ones have waited since their time.
        came = self._clock.now if arrival.moment is not None else arrival.time
        prompt = arrival.prompt
        if prompt is None:
            prompt = distinct(self.report.requests, arrival.prompt_tokens)
        request = Request(
            request_id=arrival.name,
            prompt_token_ids=prompt,
            max_tokens=arrival.max_tokens,
            stop_token_ids=STOPS,
            constrained=arrival.constrained,
            max_cached_tokens=arrival.max_cached_tokens,
            priority=arrival.priority,
            deadline=None if arrival.deadline is None else came + arrival.deadline,
        )
        self._scheduler.submit(request)
        self._live[arrival.name] = _LiveRequest(arrival, came)
        self._stops.submit(self.report.requests, arrival)
        self._irregular += arrival.constrained
        if arrival.gives_up is not None:
            heapq.heappush(self._gives_up, (arrival.gives_up[0], arrival.name, arrival.gives_up[1]))
        if self._log is not None:
            self._log.submitted(request, self._clock.now, arrival.custom_id)

    def _skip(self, ahead: Arrival | None) -> bool:
        """Take turns whose plans are known without making them: all decode the same rows, alone or beside the same
        number of chunks of one prompt. Steps in flight that are unlike these are read one by one, the others in bulk.

        Returns whether there were any.
        """
        if (
            self._log is not None
            or self.plans is not None
            or len(self._pipeline.in_flight) != self._pipeline.lag
        ):
            return False
        steady, clock = steady_plans(self._scheduler), self._clock
        if steady is None or not steady.rows:
            return False
        self._decode(steady.rows)
        steps, until = self._limits(steady, ahead)
        calls = self._machine.calls(steady.chunks)
        device, taken = self._seconds(steady, calls), 0
        unlike = [
            plan.decode is not steady.rows or plan.moves.resumes or plan.first_rows
            for plan in self._pipeline.in_flight
        ]
        while any(unlike[taken:]) and taken < steps and clock.now < until:
            clock.run(self._take_host_work(len(calls)), next(device))
            skip_plans(self._scheduler, 1, steady.chunks)
            self._pipeline.in_flight.append(Plan(step=self._next_step, decode=steady.rows))
            self._next_step += 1
            taken += 1
            self._read()
        if taken < steps and clock.now < until:
            taken += self._read_alike(steady, steps - taken, until, len(calls), device)
        report = self.report
        report.most_waiting = max(report.most_waiting, self._scheduler.num_waiting)
        report.skipped += taken
        report.decode_steps += taken
        report.row_steps += taken * len(steady.rows)
        report.prompt_tokens += taken * steady.chunks * self._scheduler.config.chunk_size
        return taken > 0

    def _limits(self, steady: Steady, ahead: Arrival | None) -> tuple[int, float]:
        """How many turns can be taken at most, and the time at which none begins any more."""
        step, steps = self._next_step, steady.steps
        until = self._scheduler.deadlines.next_time
        if not self._pipeline.lag:
            steps -= 1  # what is read at once may end a request
        if (stop := self._stops.next_step) is not None:
            steps = min(steps, stop - (step - self._pipeline.lag))
        if self._gives_up:
            moment = self._gives_up[0][0]
            steps = min(steps, moment.started - step, moment.read - (step - self._pipeline.lag))
        if ahead is not None and ahead.moment is not None:
            steps = min(steps, ahead.moment.started - step)
        elif ahead is not None:
            until = min(until, ahead.time)
        if not steady.chunks:
            steps = min(steps, self._machine.steps_alike(self._longest_base + step))
        return steps, until

    def _seconds(self, steady: Steady, calls: tuple[int, ...]) -> Iterator[float]:
        """What the device takes for each of the steps."""
        cost, step, rows = self._clock.cost, self._next_step, len(steady.rows)
        if not steady.chunks:
            growth = cost.key * (self._keys(step + 1) - self._keys(step))
            return itertools.count(cost.device(DeviceWork(rows=rows, keys=self._keys(step))), growth)
        chunk_size = self._scheduler.config.chunk_size
        tokens = steady.chunks * chunk_size
        without_keys = cost.device(DeviceWork(calls=calls, rows=rows, prompt_tokens=tokens))

        def prefills() -> Iterator[float]:
            for later in range(steady.steps):
                start = steady.start + later * tokens
                ends = range(start + chunk_size, start + tokens + 1, chunk_size)
                of_prompt = cost.prefill_key * self._machine.prefill_keys(ends)
                yield without_keys + of_prompt + cost.key * self._keys(step + later)

        return prefills()

    def _read_alike(
        self, steady: Steady, steps: int, until: float, calls: int, device: Iterator[float]
    ) -> int:
        """Take up to `steps` turns that read steps of the same rows, in bulk. Returns how many there were."""
        cost, rows = self._clock.cost, len(steady.rows)
        reads = self._clock.steady(
            steps,
            until,
            first_host=cost.host(self._take_host_work(calls)),
            host=cost.host(HostWork(tokens=rows, calls=calls)),
            device=device,
        )
        for now in reads:
            self.report.inter_token.add(now - self._last_read, rows)
            self._last_read = now
        taken = len(reads)
        skip_plans(self._scheduler, taken, steady.chunks)
        skip_commits(self._scheduler, taken, rows)
        self._next_step += taken
        unread = self._pipeline.in_flight
        for place, plan in enumerate(unread):  # all are alike: they stand for later steps now
            unread[place] = replace(plan, step=plan.step + taken)
        self._tokens = rows
        return taken

    def _is_over(self, moment: Moment) -> bool:
        return moment.started <= self._next_step and moment.read <= self._next_step - len(
            self._pipeline.in_flight
        )

    def _turn(self) -> None:
        scheduler = self._scheduler
        for name, reason in scheduler.expire(self._clock.now):
            self._end(name, reason)
        self._take_back()
        is_full = self._pipeline.is_full
        plan = None if is_full else self._pipeline.plan(self._speculation(), self._held())
        self.report.most_waiting = max(self.report.most_waiting, scheduler.num_waiting)
        if plan is not None:
            self._start(plan)
        if self._pipeline.is_due(started=plan is not None):
            self._take_back()  # a request may have been aborted while the host waited
            self._read()

    def _speculation(self) -> Speculation | None:
        widths = self._widths
        return (
            Speculation.again(widths[self._next_step]) if widths and self._next_step < len(widths) else None
        )

    def _held(self) -> Collection[str]:
        """The requests that skip the next step, as recorded; all, if the recorded turn planned none."""
        log, number = self._recorded, self._next_step
        if log is None or number >= len(log.steps):
            return ()
        step, read = log.steps[number], number - len(self._pipeline.in_flight)
        if step.is_late and read < bisect.bisect_right(self._read_after, number):
            return self._live
        return [log.requests[index].name for index in step.held]

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
        ends, prompt_tokens = [], 0
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            prompt_tokens += end - chunk.start
            ends.append(end)
            if chunk.is_last:
                name, sampled = chunk.request_id, chunk.generated + 1
                is_over = sampled == self._live[name].arrival.new_tokens
                self._begin(name, plan.step if is_over else plan.joins, keys=end + 1, sampled=sampled)
                self._live[name].back = plan.step  # this step samples its next token already
        for swap in plan.moves.resumes:
            prompt = self._live[swap.request_id].arrival.prompt_tokens
            self._begin(swap.request_id, plan.step, keys=swap.length + 1, sampled=swap.length - prompt + 1)
        report.prompt_tokens += prompt_tokens
        self._decode(plan.decode)
        rows = len(plan.decode) + len(plan.verify)
        report.decode_steps += rows > 0
        report.row_steps += rows
        work = DeviceWork(
            calls=self._machine.calls(len(ends)) if ends else (),
            prefill_keys=self._machine.prefill_keys(ends) if ends else 0,
            rows=rows,
            keys=self._keys(plan.step, plan.verify) if rows else 0,
            moved=sum(swap.length for swap in (*plan.moves.parks, *plan.moves.resumes)),
            prompt_tokens=prompt_tokens,
            checked=sum(row.width - 1 for row in plan.verify),
        )
        clock.start(self._take_host_work(len(work.calls)), work)
        self._pipeline.in_flight.append(plan)
        self._next_step = plan.step + 1
        if self._log is not None:
            self._log.started(plan, clock.now)
        if self.plans is not None:
            self.plans.append(plan)

    def _decode(self, rows: tuple[Row, ...]) -> None:
        """Let the next step decode these rows."""
        if rows is not self._rows:
            self._rows = rows
            bases = [self._base[row.request_id] for row in rows]
            self._total_base, self._longest_base = sum(bases), max(bases, default=0)

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

    def _keys(self, step: int, rows: Sequence[VerifyRow] = ()) -> int:
        """Keys that a step's rows read. Those that speculate have what is known of them, and one of each step that is
        not read."""
        held = [self._base[row.request_id] + step for row in rows]
        total, longest = self._total_base + len(self._rows) * step, self._longest_base + step
        return self._machine.decode_keys(total + sum(held), max(longest, *held) if held else longest)

    def _take_host_work(self, calls: int) -> HostWork:
        work = HostWork(self._tokens, self._ended, calls, self._woken)
        self._tokens = self._ended = self._woken = 0
        return work

    def _read(self) -> None:
        plan = self._pipeline.in_flight.popleft()
        now = self._clock.read()
        if self.plans is not None:
            self.reads.append(self._next_step)
        events = self._scheduler.commit(plan, self._stops.result(plan))
        for row, (tokens, _) in zip(plan.verify, events.verified, strict=True):
            if row.request_id in self._base:
                self._base[row.request_id] += max(tokens - 1, 0)
        if self._log is not None:
            self._log.read(plan, events, now)
        self._credit(plan, events, now)
        self._last_read = now

    def _credit(self, plan: Plan, events: Events, now: float) -> None:
        """Count the intervals between tokens. A row's first token and second mostly come out of the same step."""
        report = self.report
        names: list[str] = []
        several = bool(events.several)
        if several or self._irregular:
            names = [name for name, _, _ in events]
        if several:
            latest = [names.pop() for _ in events.several]
            names += dict.fromkeys(reversed(latest))
            if together := len(events) - len(names):  # tokens that came with the one before
                report.inter_token.add(0.0, together)
        apart = len(names) if several else len(events)  # tokens that came one read after the one before
        if plan.chunks or self._irregular:
            fresh = {chunk.request_id for chunk in plan.first_rows}
            for name in (
                names if several or self._irregular else [row for row, _, _ in events.of_latest(len(fresh))]
            ):
                live = self._live[name]
                if not live.had_token:
                    live.had_token = True
                    report.first_token.add(now - live.came)
                elif live.away and (live.back is None or plan.step < live.back):
                    live.last_token = now  # it was in flight when the slot was lost
                    continue
                elif live.away or name in fresh or live.arrival.constrained:
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
        for name, _, reason in (*events.first, *events.ended, *events.several):
            if reason is not None:
                self._end(name, reason)

    def _end(self, name: str, reason: FinishReason) -> None:
        live = self._live.pop(name)
        self._stops.end(name)
        self._irregular -= live.arrival.constrained + live.away
        self._base.pop(name, None)
        self.report.finished[str(reason)] += 1
        self._ended += 1
        if live.had_token:
            self.report.whole.add(self._clock.now - live.came)
        if self._log is not None:
            self._log.ended(name, reason, self._clock.now)
