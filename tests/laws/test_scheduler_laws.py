"""The scheduler's laws over generated cases, against a stand-in device that refuses wrong plans.

`tests.support.fake_runner` and `tests.support.fake_loop` state the laws of a plan (order, gaps, ownership, budget) and
of a request (it returns what it returns alone). The last part breaks the scheduler on purpose, to show that these laws
can fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support import fake_loop
from tests.support.fake_loop import Loop
from tests.support.fake_runner import VOCABULARY, expected
from tests.support.faults import credit_goes_to_the_slot
from xla_engine.scheduler import (
    Events,
    FinishReason,
    Plan,
    Request,
    Scheduler,
    SchedulerConfig,
    Slot,
    Slots,
    StepResult,
    WaitingQueue,
    policy,
)
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps import commit as crediting
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.decode import Decoding

QUICK = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 4),
    chunk_size=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 20),
    max_waiting=st.none(),
    priority_aging=st.integers(1, 4),
)
token_ids = st.integers(0, VOCABULARY - 1)


def requests(request_id: str) -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        request_id=st.just(request_id),
        prompt_token_ids=st.lists(token_ids, min_size=1, max_size=12).map(tuple),
        max_tokens=st.integers(1, 8),
        host_gated=st.booleans(),
        stop_token_ids=st.frozensets(token_ids, max_size=3),
        priority=st.sampled_from([0, 0, -1, 2, 10]),
    )


def within(request: Request, now: float, times: tuple[int | None, int | None]) -> Request:
    deadline, queue_deadline = (None if time is None else now + time for time in times)
    return replace(request, deadline=deadline, queue_deadline=queue_deadline)


patience = st.none() | st.integers(0, 9)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything a caller and a device may do, in any order and at any lag."""

    @initialize(config=configs)
    def begin(self, config: SchedulerConfig) -> None:
        self.loop = Loop(config)

    @rule(
        request=st.integers(0, 7).flatmap(lambda number: requests(f"r{number}")),
        times=st.tuples(patience, patience),
    )
    def submit(self, request: Request, times: tuple[int | None, int | None]) -> None:
        request = within(request, self.loop.now, times)
        if request.request_id in self.loop.live:
            with pytest.raises(ValueError, match="choose another"):
                self.loop.scheduler.submit(request)
        else:
            self.loop.submit(request)

    @rule()
    def plan(self) -> None:
        self.loop.plan()

    @precondition(lambda self: self.loop.in_flight)
    @rule(steps=st.integers(1, 4))
    def commit(self, steps: int) -> None:
        for _ in range(min(steps, len(self.loop.in_flight))):
            self.loop.commit()

    @rule(number=st.integers(0, 7), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def finish(self, number: int, reason: FinishReason) -> None:
        self.loop.finish(f"r{number}", reason)

    @rule(seconds=st.integers(0, 4))
    def pass_time(self, seconds: int) -> None:
        self.loop.pass_time(seconds)

    @rule()
    def restart(self) -> None:
        self.loop.restart()

    @invariant()
    def holds(self) -> None:
        self.loop.scheduler.check()
        counters = self.loop.scheduler.snapshot().counters
        assert sum(counters.finished.values()) == len(self.loop.ended)
        assert counters.submitted == len(self.loop.ended) + len(self.loop.live)

    def teardown(self) -> None:
        self.loop.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(QUICK, max_examples=60, stateful_step_count=40)


@settings(QUICK, max_examples=60)
@given(data=st.data(), config=configs, count=st.integers(1, 12), lag=st.integers(0, 4))
def test_every_request_ends_once_with_the_tokens_it_gets_alone(
    data: st.DataObject, config: SchedulerConfig, count: int, lag: int
) -> None:
    loop = Loop(config)
    submitted = [data.draw(requests(f"r{number}")) for number in range(count)]
    arrivals = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    for request, gap in zip(submitted, arrivals, strict=True):
        for _ in range(gap):
            loop.turn(lag)
        loop.submit(request)
    loop.drain(lag)
    assert sorted(life.request.request_id for life in loop.ended) == sorted(r.request_id for r in submitted)
    assert all(life.reason == expected(life.request)[1] for life in loop.ended)
    if len({request.priority for request in submitted}) == 1:
        admitted = [request_id for plan in loop.plans for request_id in plan.admitted]
        assert admitted == [request.request_id for request in submitted]  # arrival order is admission order
    counters = loop.scheduler.snapshot().counters
    assert counters.tokens_credited == sum(len(expected(request)[0]) for request in submitted)


@settings(QUICK, max_examples=40)
@given(data=st.data(), config=configs)
def test_lag_and_peers_change_no_token(data: st.DataObject, config: SchedulerConfig) -> None:
    """Also that the budget shapes only when chunks run: any budget gives each prompt the same chunks."""
    submitted = [data.draw(requests(f"r{number}")) for number in range(5)]
    seen = []
    for lag, budget in ((0, 1), (1, 9), (3, 1000)):
        loop = Loop(replace(config, max_num_batched_tokens=budget))
        for request in submitted:
            loop.submit(request)
        loop.drain(lag)
        lives = {life.request.request_id: (life.samples, life.reason) for life in loop.ended}
        cuts = {(c.request_id, c.start, c.tokens, c.is_last) for plan in loop.plans for c in plan.chunks}
        seen.append((lives, cuts))
    assert seen[0] == seen[1] == seen[2]


@settings(QUICK, max_examples=60)
@given(data=st.data(), config=configs)
def test_prompt_in_a_slot_is_planned_within_its_own_and_all_older_chunks(
    data: st.DataObject, config: SchedulerConfig
) -> None:
    """The progress bound: nothing delays a prompt in a slot but the prompts that were there before it."""
    loop = Loop(config)
    count = data.draw(st.integers(1, 8))
    for number in range(count):
        loop.submit(data.draw(requests(f"r{number}")))
    left: dict[str, int] = {}
    due: dict[str, int] = {}
    while loop.live:
        plan = loop.plan()
        for request_id in plan.admitted:
            chunks = policy.num_chunks(len(loop.live[request_id].request.prompt_token_ids), config.chunk_size)
            due[request_id] = plan.step + sum(left.values()) + chunks
            left[request_id] = chunks
        for chunk in plan.chunks:
            left[chunk.request_id] -= 1
            assert plan.step < due[chunk.request_id], f"{chunk} comes after its bound"
        assert plan.is_empty or plan.chunks or not any(left.values())
        loop.commit()


@settings(QUICK, max_examples=100)
@given(
    aging=st.integers(1, 5),
    priorities=st.lists(st.integers(-3, 3), max_size=40),
    pops=st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
def test_nobody_starves(aging: int, priorities: list[int], pops: list[int]) -> None:
    """The bound of `policy.place`: how many later arrivals of each priority may go before a request."""
    loop = Loop(SchedulerConfig(max_num_seqs=1, chunk_size=1, max_num_batched_tokens=1, priority_aging=aging))
    admitted: list[int] = []
    for number, (priority, steps) in enumerate(zip(priorities, pops, strict=False)):
        request = Request(request_id=str(number), prompt_token_ids=(1,), max_tokens=1, priority=priority)
        loop.submit(request)
        for _ in range(steps):
            admitted.extend(map(int, loop.turn().admitted))
    while loop.live:
        admitted.extend(map(int, loop.turn().admitted))
    assert sorted(admitted) == list(range(len(priorities)))
    for position, number in enumerate(admitted):
        for other in range(-3, 4):
            overtakers = [n for n in admitted[:position] if n > number and priorities[n] == other]
            assert len(overtakers) <= max((priorities[number] - other) * aging - 1, 0)
        assert all(n < number or priorities[n] < priorities[number] for n in admitted[:position])


def test_memory_of_deadlines_is_bounded_by_what_is_live() -> None:
    loop = Loop(SchedulerConfig(max_num_seqs=2, chunk_size=4, max_num_batched_tokens=16))
    rng = random.Random(1)
    for number in range(1000):
        loop.submit(within(some_request(rng, str(number)), 0.0, (10**6, 10**6)))
        while len(loop.live) > 8:
            loop.turn()
        assert len(loop.scheduler._deadlines) <= 8 * len(loop.live) + 80
        loop.plans.clear()
    loop.drain()
    assert {life.reason for life in loop.ended} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ERROR,
    }


@settings(QUICK, max_examples=60)
@given(data=st.data(), lag=st.integers(1, 4), slots=st.integers(1, 2))
def test_cancel_and_resubmit_into_the_same_slot_never_leaks_a_token(
    data: st.DataObject, lag: int, slots: int
) -> None:
    loop = Loop(SchedulerConfig(max_num_seqs=slots, chunk_size=4, max_num_batched_tokens=16))
    for _ in range(data.draw(st.integers(1, 6))):
        loop.submit(data.draw(requests("same")))
        for _ in range(data.draw(st.integers(0, lag))):
            loop.turn(lag)
        loop.finish("same")
    loop.submit(data.draw(requests("same")))
    loop.drain(lag)


def test_cancel_and_resubmit_in_ten_thousand_seeded_trials() -> None:
    rng = random.Random(0)
    loop = Loop(SchedulerConfig(max_num_seqs=2, chunk_size=4, max_num_batched_tokens=16))
    for _ in range(10_000):
        request_id = rng.choice("ab")
        loop.finish(request_id)
        loop.submit(some_request(rng, request_id))
        loop.turn(rng.randint(0, 3))
        loop.plans.clear()
    loop.drain(lag=2)
    assert len(loop.ended) == 10_000


def test_same_calls_give_the_same_plans() -> None:
    def run() -> list[Plan]:
        loop = storm(random.Random(3), turns=60)
        loop.drain(lag=1)
        return loop.plans

    assert run() == run()


def some_request(rng: random.Random, request_id: str) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))),
        max_tokens=rng.randint(1, 8),
        host_gated=rng.random() < 0.3,
        stop_token_ids=frozenset({rng.randrange(VOCABULARY)}),
        priority=rng.choice([0, 0, 0, 1, -1]),
    )


def storm(rng: random.Random, turns: int = 40) -> Loop:
    """A loop after some turns of submits, aborts and resubmits at a lag of 0 to 3."""
    loop = Loop(
        SchedulerConfig(
            max_num_seqs=rng.randint(1, 3),
            chunk_size=3,
            max_num_batched_tokens=rng.choice([2, 8, 30]),
            priority_aging=2,
        )
    )
    lag = rng.randint(0, 3)
    for _ in range(turns):
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            request_id = f"r{rng.randrange(5)}"
            if rng.random() < 0.5:
                loop.finish(request_id)
            if request_id not in loop.live:
                times = rng.choice([(None, None), (None, None), (4, None), (30, 2)])
                loop.submit(within(some_request(rng, request_id), loop.now, times))
        loop.pass_time(1)
        if rng.random() < 0.03:
            loop.restart()
        loop.turn(lag)
        loop.scheduler.check()
    return loop


def epochs_never_move(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Slots.release

    def stuck(self: Slots, slot: Slot, use: int = 0) -> None:
        release(self, slot, use)
        self._epochs[slot.index] -= 1

    monkeypatch.setattr(Slots, "release", stuck)


def credit_ignores_the_tenancy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a token went to the request that has the id now."""
    commit = Scheduler.commit

    def careless(self: Scheduler, plan: Plan, result: StepResult) -> Events:
        def today(part):  # type: ignore[no-untyped-def]
            state = self._states.get(part.request_id)
            return replace(part, slot=state.tenancy) if state and state.tenancy else part

        plan = replace(plan, chunks=tuple(map(today, plan.chunks)), decode=tuple(map(today, plan.decode)))
        return commit(self, plan, result)

    monkeypatch.setattr(Scheduler, "commit", careless)


def busy_slot_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "acquire", lambda self, index=None: self.current(0))


def slot_is_handed_over_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    due = Decoding.due
    monkeypatch.setattr(Decoding, "due", lambda self, step: due(self, step + 1) + due(self, step))


def cap_is_one_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Decoding.join

    def late(self: Decoding, state: RequestState, step: int, *, sampled: int) -> None:
        join(self, state, step + 1, sampled=sampled)

    monkeypatch.setattr(Decoding, "join", late)


def queue_is_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: WaitingQueue) -> RequestState:
        return max(self, key=lambda state: state.arrival)

    monkeypatch.setattr(WaitingQueue, "head", property(last))


def priority_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request ages: a low priority may starve."""
    monkeypatch.setattr(policy, "place", lambda arrival, priority, aging: (priority, arrival))


def priority_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "place", lambda arrival, priority, aging: (arrival, arrival))


def missing_choice_is_taken_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crediting, "NO_CHOICE", -99)


def tokens_are_kept_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a request went on where it was, with its state on the device gone."""
    restarted = fake_loop.restarted

    def careless(old: Scheduler) -> Scheduler:
        fresh = restarted(old)
        for request_id, state in old._states.items():
            fresh._states[request_id].credited = state.credited
        return fresh

    monkeypatch.setattr(fake_loop, "restarted", careless)


def one_slot_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "num_free", property(lambda self: max(len(self._free) - 1, 0)))


def budget_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "grant", lambda chunks_left, *_, **__: chunks_left)


def floor_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = policy.grant
    monkeypatch.setattr(policy, "grant", lambda *args, **kwargs: grant(*args, **(kwargs | {"first": False})))


def cut_depends_on_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(start: int, tokens: int, size: int, count: int) -> list[tuple[int, int]]:
        return [(start, min(start + size + 1, tokens))][:count]

    monkeypatch.setattr(policy, "next_cuts", cut)


def stop_tokens_are_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which every row gets one token more is taken too easily."""
    joined = Committer.joined

    def careless(self: Committer, state: RequestState) -> None:
        joined(self, state)
        self._stops.clear()

    monkeypatch.setattr(Committer, "joined", careless)


def samples_of_the_dead_are_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "ended", lambda *_: None)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    epochs_never_move,
    credit_ignores_the_tenancy,
    credit_goes_to_the_slot,
    busy_slot_is_given_away,
    slot_is_handed_over_a_step_early,
    cap_is_one_too_high,
    queue_is_a_stack,
    priority_is_strict,
    priority_is_ignored,
    missing_choice_is_taken_for_a_token,
    tokens_are_kept_over_a_restart,
    one_slot_is_never_used,
    budget_is_ignored,
    floor_is_forgotten,
    cut_depends_on_the_load,
    stop_tokens_are_overlooked,
    samples_of_the_dead_are_credited,
]


def storms() -> None:
    for seed in range(30):
        loop = storm(random.Random(seed))
        submitted = [life.request for life in (*loop.ended, *loop.live.values())]
        loop.drain(lag=1)
        assert len(submitted) == len(loop.ended)


def test_storms_pass_without_a_fault() -> None:
    storms()


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # PlanError is an AssertionError; a token for a request that is not there is a LookupError.
    with pytest.raises((AssertionError, ValueError, LookupError)):
        storms()
