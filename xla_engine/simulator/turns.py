"""One turn of a simulated engine: a plan that starts, a plan that is read, and what is counted of both."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Collection, Sequence

from xla_engine.observability.step_log import LoggedStep, Moment, StepLog
from xla_engine.observability.step_log_writer import StepLogWriter
from xla_engine.scheduler import (
    Events,
    FinishReason,
    Plan,
    Row,
    Scheduler,
    SchedulerConfig,
    Speculation,
    VerifyRow,
)
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.simulator.clock import Clock
from xla_engine.simulator.cost import DeviceWork, HostWork, Machine
from xla_engine.simulator.live_request import LiveRequest
from xla_engine.simulator.report import Report
from xla_engine.simulator.stops import StopTokens


class Turns:
    """The loop of an engine, turn by turn, on a simulated clock. Arguments are those of `Simulation`."""

    def __init__(
        self,
        config: SchedulerConfig,
        machine: Machine,
        clock: Clock,
        *,
        lag: int = 1,
        log: StepLogWriter | None = None,
        speculated: Sequence[LoggedStep] | None = None,
        recorded: StepLog | None = None,
    ) -> None:
        self.report = Report(config=config)
        self.plans: list[Plan] | None = None  # set to a list to keep them
        self.reads: list[int] = []  # with `plans`: how many steps were started when each was read
        self._scheduler = Scheduler(config)
        self._machine = machine
        self._clock = clock
        self._lag = lag
        self._log = log
        self._live: dict[str, LiveRequest] = {}
        self._in_flight: deque[Plan] = deque()
        self._irregular = 0  # live requests that do not get a token in every step
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

    def _is_over(self, moment: Moment) -> bool:
        return moment.started <= self._next_step and moment.read <= self._next_step - len(self._in_flight)

    def _turn(self) -> None:
        scheduler = self._scheduler
        for name, reason in scheduler.expire(self._clock.now):
            self._end(name, reason)
        self._take_back()
        plan = scheduler.plan(self._speculation(), self._held())
        self.report.most_waiting = max(self.report.most_waiting, scheduler.num_waiting)
        started = not plan.is_empty
        if started:
            self._start(plan)
        while len(self._in_flight) > (self._lag if started else 0):
            self._take_back()  # a request may have been taken back while the host waited
            self._read()
            started = True

    def _speculation(self) -> Speculation | None:
        widths = self._widths
        return (
            Speculation.again(widths[self._next_step]) if widths and self._next_step < len(widths) else None
        )

    def _held(self) -> Collection[str]:
        """The requests that sit out the next step, as recorded; all, where a turn had none to plan then."""
        log, number = self._recorded, self._next_step
        if log is None or number >= len(log.steps):
            return ()
        step, read = log.steps[number], number - len(self._in_flight)
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
        for swap in plan.resumes:
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
            moved=sum(swap.length for swap in (*plan.parks, *plan.resumes)),
            prompt_tokens=prompt_tokens,
            checked=sum(row.width - 1 for row in plan.verify),
        )
        clock.start(self._take_host_work(len(work.calls)), work)
        self._in_flight.append(plan)
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
        plan = self._in_flight.popleft()
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
        for name, _, reason in (*events.first, *events.ended, *events.several):
            if reason is not None:
                self._end(name, reason)

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
