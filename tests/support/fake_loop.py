"""A stand-in for the engine around the fake runner: it states the laws that a caller may rely on."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.support.fake_runner import FakeRunner, expected
from xla_engine.scheduler import (
    NO_CHOICE,
    Events,
    FinishReason,
    Plan,
    Request,
    RequestView,
    Sample,
    Scheduler,
    SchedulerConfig,
    Snapshot,
    Speculation,
    Status,
    StepResult,
    stored_blocks,
)
from xla_engine.scheduler.peek import peek
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.scheduler.snapshot import NEXT


@dataclass
class Life:
    """One life of a request id, as the caller saw it."""

    request: Request
    place: tuple[int, int]
    samples: list[Sample] = field(default_factory=list)
    had_slot: bool = False  # before a restart
    reason: FinishReason | None = None

    def check(self) -> None:
        """The law: a request returns its result alone, or the beginning of it if it was ended early."""
        samples, reason = expected(self.request)
        assert self.reason is not None, f"never ended: {self}"
        if self.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (self.samples, self.reason) == (samples, reason), f"{self}, not {samples}, {reason}"
        elif (self.samples, self.reason) != (samples, reason):
            # an ERROR may be this request's own, or the caller's
            assert self.samples == samples[: len(self.samples)], f"{self} should begin {samples}"
            still_to_come = len(samples) - len(self.samples) + (reason is FinishReason.ERROR)
            assert still_to_come > 0, f"taken back after its end: {self}"


class Loop:
    """The engine's loop: `turn(lag)` plans a step, starts it, and reads those older than `lag` steps.

    The pipeline is the engine's own. Steps are read as late as `lag` allows, even where its `depth` is smaller.

    peeks: look first at what each plan will be, and see that it is that.
    draw: decides which stored blocks can be read.
    loaded: blocks that were loaded.
    """

    peeks = False

    def __init__(self, config: SchedulerConfig) -> None:
        self.pipeline: StepPipeline[tuple[Plan, StepResult]] = StepPipeline(Scheduler(config), lag=0)
        self.runner = FakeRunner(config)
        self.live: dict[str, Life] = {}
        self.queue: dict[str, tuple[int, int]] = {}  # id to its place
        self.arrivals = 0
        self.now = 0.0
        self.ended: list[Life] = []
        self.plans: list[Plan] = []
        self.preempted: Counter[str] = Counter()
        self.speculation: Speculation | None = None  # of the next plans
        self.blocked: frozenset[str] = frozenset()  # likewise
        self.draw = random.Random(0)
        self.loaded = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.pipeline.scheduler

    @property
    def in_flight(self) -> deque[tuple[Plan, StepResult]]:
        return self.pipeline.in_flight

    def submit(self, request: Request) -> None:
        stored = stored_blocks.loadable(self.scheduler, request, self._count_outside)
        if stored and request.max_cached_tokens != 0:
            request = replace(request, stored_blocks=stored)
        self.scheduler.submit(request)
        self.live[request.request_id] = Life(request, self.place(request.priority))
        self.queue[request.request_id] = self.place(request.priority)
        self.arrivals += 1
        self.runner.requests[request.request_id] = request

    def read_stored(self) -> None:
        """Let the request that waits for stored blocks have some of them, or none; perhaps not yet."""
        request = stored_blocks.waiting(self.scheduler)
        if request is None or (self.plans and not self.plans[-1].is_empty and self.draw.random() < 0.5):
            return
        keys = [each.key for each in stored_blocks.missing_blocks(self.scheduler, request)]
        readable = {key for key in keys if key in self.runner.outside and self.draw.random() < 0.9}
        self.loaded += len(stored_blocks.load(self.scheduler, request.request_id, readable))

    def _count_outside(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are stored."""
        return next((at for at, key in enumerate(keys) if key not in self.runner.outside), len(keys))

    def place(self, priority: int) -> tuple[int, int]:
        """The place in line of the next arrival."""
        return self.arrivals + priority * self.scheduler.config.priority_aging, self.arrivals

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and see that exactly those end whose time is up."""
        self.now += seconds
        due = set()
        for request_id, life in self.live.items():
            times = [life.request.deadline]
            if request_id in self.queue and not life.had_slot:
                times.append(life.request.queue_deadline)
            if any(time is not None and time <= self.now for time in times):
                due.add(request_id)
        expired = self.scheduler.expire(self.now)
        assert {request_id for request_id, _ in expired} == due, f"{expired} expired, not {due}"
        for request_id, reason in expired:
            request = self.live[request_id].request
            time = request.deadline if reason is FinishReason.DEADLINE else request.queue_deadline
            assert time is not None and time <= self.now, f"{request_id} ended by {reason} before its time"
            self._end(request_id, reason)

    def restart(self) -> None:
        """The device's state is lost: begin again with everything that lives."""
        self.pipeline.restart(None, self.live)
        self.runner.lose_everything()
        for request_id, life in self.live.items():
            life.samples.clear()  # they come again
            life.had_slot = life.had_slot or request_id not in self.queue
            self.queue[request_id] = life.place

    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> str | None:
        """Take a request's slot away."""
        how = self.scheduler.preempt(request_id, how=how, to_back=to_back)
        if how is not None:
            life = self.live[request_id]
            if to_back:
                life.place = self.place(life.request.priority)
                self.arrivals += 1
            self._lost_its_slot(request_id, how)
        return how

    def _lost_its_slot(self, request_id: str, how: str) -> None:
        life = self.live[request_id]
        self.queue[request_id] = life.place
        life.had_slot = True
        self.preempted[how] += 1
        if how != "park":
            self.runner.vacate(request_id)

    def plan(self) -> Plan:
        """Plan and start one step."""
        before = self.scheduler.snapshot()
        free = sum(slot.request is None for slot in before.slots)
        unread = [view.request_id for view in before.waiting if self._is_not_next(view)]
        oldest = min(self.live, key=lambda name: self.live[name].place, default=None)
        plan = self._next_plan()
        self._check_promises(before, plan)
        by_preemption = [each for each in plan.decisions if each.action in WAYS_TO_PREEMPT]
        pooled = self.scheduler.config.num_blocks is not None
        assert self.scheduler.config.preemption or pooled or not by_preemption, f"preempted unasked: {plan}"
        for lost in by_preemption:
            assert lost.request_id != oldest, f"the first of all was preempted: {plan}"
            place = self.live[lost.request_id].place
            if pooled:  # for a row that grows, perhaps itself, or an arrival
                gained = [*plan.admitted, *(table.request_id for table in plan.moves.tables), lost.request_id]
                first = min(self.live[name].place for name in gained)
                assert place > first or {*gained} == {lost.request_id}, f"preempted by a later one: {plan}"
                self._lost_its_slot(lost.request_id, lost.action)
            else:
                later = max(self.live[name].place for name in plan.admitted)
                assert place > later, f"preempted by a later one: {plan}"
        line = sorted(self.queue, key=self.queue.__getitem__)
        ready = line[: min((line.index(name) for name in unread), default=len(line))]
        granted = min(free + len(by_preemption), len(ready))
        if pooled:  # blocks may be short instead
            granted = min(granted, len(plan.admitted))
        assert plan.admitted == tuple(ready[:granted]), f"{free} free slots are for {ready}: {plan}"
        for request_id in plan.admitted:
            del self.queue[request_id]
        for lost in by_preemption if not pooled else ():
            self._lost_its_slot(lost.request_id, lost.action)
        for request_id in plan.moves.replays:
            self.live[request_id].samples.clear()  # they come again
        prompts = [slot.request for slot in self.scheduler.snapshot().slots if slot.request is not None]
        self._check_order(prompts)
        stuck = not plan.chunks and any(request.status is Status.PREFILLING for request in prompts)
        assert not stuck, f"prompts in slots, but none advances: {plan}"
        self.plans.append(plan)
        self._check_constrained(plan)
        if not plan.is_empty:
            self.in_flight.append((plan, self.runner.start(plan)))
        return plan

    def _check_promises(self, before: Snapshot, plan: Plan) -> None:
        """What the snapshot before a plan says about the queue is what comes, unless the plan preempts."""
        told = [each.reason for each in plan.decisions]
        if any(each.action in WAYS_TO_PREEMPT for each in plan.decisions):
            return
        for view in before.waiting:
            said = view.decision
            if said is not None and said.action == NEXT:
                assert view.request_id in plan.admitted, f"{said} did not come: {plan}"
                if (slot := said.reason.split()[2]) != "slot":
                    assert f"slot {slot} was free" in told, f"{said}: {plan}"
            if said is not None and said.reason.startswith("no free slot"):
                assert all(slot.request is not None for slot in before.slots), f"{said} beside a free slot"

    def _is_not_next(self, view: RequestView) -> bool:
        """Whether a request that waits gets no slot: tokens of it are unread, or it needs a mask that is not there."""
        if view.credited < view.planned:
            return True
        gated = self.live[view.request_id].request.constrained and view.request_id in self.blocked
        return gated and view.status is Status.WAITING and view.credited > 0

    def _next_plan(self) -> Plan:
        self.read_stored()
        if not self.peeks:
            return self.scheduler.plan(self.speculation, self.blocked)
        before = self.scheduler.snapshot()
        foreseen = peek(self.scheduler, self.speculation, blocked=self.blocked, now=self.now)
        assert self.scheduler.snapshot() == before, "a look at the next plan has changed something"
        plan = self.scheduler.plan(self.speculation, self.blocked)
        assert foreseen.plan == plan and not foreseen.expired, f"{foreseen.plan} was foreseen, not {plan}"
        assert foreseen.then == self.scheduler.snapshot(), f"{foreseen.then} was foreseen"
        return plan

    def _check_order(self, held: list[RequestView]) -> None:
        """Where places count, the first in line waits for requests of earlier places only, or for a read."""
        waiting = self.scheduler.snapshot().waiting
        if (
            self.scheduler.config.preemption
            and self.scheduler.config.num_blocks is None
            and held
            and waiting
            and not self._is_not_next(waiting[0])
        ):
            last = max(self.live[view.request_id].place for view in held)
            assert last < self.queue[waiting[0].request_id], f"{waiting[0]} waits for one behind it"

    def _check_constrained(self, plan: Plan) -> None:
        """A constrained row decodes when no sample of its occupancy is in flight, and only then."""
        in_flight = {
            part.slot for old, _ in self.in_flight for part in (*old.first_rows, *old.decode, *old.verify)
        }
        in_flight |= {chunk.slot for chunk in plan.first_rows}
        asked = {
            row.slot
            for row in (*plan.decode, *plan.verify)
            if self.runner.requests[row.request_id].constrained
        }
        assert not asked & in_flight, f"{asked & in_flight} decode before their last token was read"
        decoding = {row.request_id for row in (*plan.decode, *plan.verify)}
        gated = {name for name in self.blocked & self.live.keys() if self.live[name].request.constrained}
        assert plan.blocked == gated and not decoding & gated, (
            f"{decoding & gated} decode without a mask: {plan}"
        )
        leaving = {swap.slot for swap in plan.moves.parks}
        for row in self.runner.rows:
            if row.request_id is None or row.slot is None or row.over or row.token is None:
                continue
            if row.slot in leaving or row.request_id in self.blocked:
                continue
            if self.runner.requests[row.request_id].constrained and row.slot not in in_flight:
                assert row.slot in asked, f"{row} could decode, but does not"

    def commit(self) -> Events:
        """Read the oldest step in flight."""
        events = self.scheduler.commit(*self.in_flight.popleft())
        for event in events:
            assert event.request_id in self.live, f"an event for no live request: {event}"
            if event.sample.token_id == NO_CHOICE:
                assert event.finish_reason is FinishReason.ERROR, f"goes on without a token: {event}"
            else:
                self.live[event.request_id].samples.append(event.sample)
            if event.finish_reason is not None:
                self._end(event.request_id, event.finish_reason)
        return events

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        known = request_id in self.live
        took = self.scheduler.finish(request_id, reason)
        assert took == known, f"finish said {took} of a request that was {'live' if known else 'unknown'}"
        if took:
            self._end(request_id, reason)
        return took

    def _end(self, request_id: str, reason: FinishReason) -> None:
        life = self.live.pop(request_id)
        self.queue.pop(request_id, None)
        assert life.reason is None, f"ended twice: {life}"
        life.reason = reason
        self.ended.append(life)
        self.runner.release(request_id)

    def turn(self, lag: int = 0) -> Plan:
        plan = self.plan()
        while len(self.in_flight) > (0 if plan.is_empty else lag):
            self.commit()
        return plan

    def drain(self, lag: int = 0) -> None:
        """Run to the end, and check every request's result."""
        quiet, self.blocked = 0, frozenset()
        while self.live:
            self.turn(lag)
            self.scheduler.check()
            waits = self.plans[-1].is_empty and self.scheduler.awaits_blocks is None  # those are read next
            quiet = quiet + 1 if waits else 0
            assert quiet < 2, f"nothing to plan, but these are live: {self.live}"
        while self.in_flight:
            self.commit()
        self.check()

    def check(self) -> None:
        """The laws that hold whenever no request is live."""
        self.scheduler.check()
        assert not self.scheduler.has_unfinished, "the scheduler still has requests"
        for life in self.ended:
            life.check()
