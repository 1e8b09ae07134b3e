"""The scheduler's laws over generated cases, against a stand-in device that refuses wrong plans.

`tests.support.fake_runner` and `tests.support.fake_loop` state the laws of a plan (order, gaps, ownership, budget) and
of a request (it returns what it returns alone). `test_scheduler_faults` breaks the scheduler on purpose, to show that
these laws can fail.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fake_loop import Loop
from tests.support.fake_runner import VOCABULARY, expected
from tests.support.storms import some_request, storm, within
from xla_engine.scheduler import FinishReason, Plan, Request, SchedulerConfig, policy

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
        constrained=st.booleans(),
        stop_token_ids=st.frozensets(token_ids, max_size=3),
        priority=st.sampled_from([0, 0, -1, 2, 10]),
    )


patience = st.none() | st.integers(0, 9)


class SchedulerMachine(RuleBasedStateMachine):
    """Everything a caller and a device may do, in any order and at any lag."""

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

    @rule(numbers=st.frozensets(st.integers(0, 7), max_size=3))
    def hold(self, numbers: frozenset[int]) -> None:
        """The grammar masks of these requests are not ready yet."""
        self.loop.blocked = frozenset(f"r{number}" for number in numbers)

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
    """The token budget, too, decides only when chunks run: every budget gives a prompt the same chunks."""
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


@pytest.mark.full
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
        assert len(loop.scheduler.deadlines) <= 8 * len(loop.live) + 80
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


@pytest.mark.parametrize("trials", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_cancel_and_resubmit_in_many_seeded_trials(trials: int) -> None:
    rng = random.Random(0)
    loop = Loop(SchedulerConfig(max_num_seqs=2, chunk_size=4, max_num_batched_tokens=16))
    for _ in range(trials):
        request_id = rng.choice("ab")
        loop.finish(request_id)
        loop.submit(some_request(rng, request_id))
        loop.turn(rng.randint(0, 3))
        loop.plans.clear()
    loop.drain(lag=2)
    assert len(loop.ended) == trials


def test_same_calls_give_the_same_plans() -> None:
    def run() -> list[Plan]:
        loop = storm(random.Random(3), turns=60)
        loop.drain(lag=1)
        return loop.plans

    assert run() == run()
