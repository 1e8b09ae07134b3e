"""Rows that sample several tokens a step, mixed with every other feature: each request gets its results alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fake_loop import Loop
from tests.support.fake_runner import VOCABULARY
from xla_engine.scheduler import (
    FinishReason,
    Plan,
    Request,
    ResultMismatchError,
    Scheduler,
    SchedulerConfig,
    Speculation,
    StepResult,
)
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.decode import Speculating

# shrinking a schedule takes minutes
QUICK = settings(
    deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
token_ids = st.integers(0, VOCABULARY - 1)
speculations = st.none() | st.builds(Speculation, width=st.integers(1, 6), lanes=st.integers(1, 5))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    slots, block = draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8]))
    caching = draw(st.booleans())
    return SchedulerConfig(
        max_num_seqs=slots,
        chunk_size=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(4, 20)),
        priority_aging=draw(st.integers(1, 4)),
        enable_prefix_caching=caching,
        block_size=block,
        num_blocks=draw(st.none() | st.integers(-(-30 // block), 40)),
        prefill_equals_decode=draw(st.booleans()),
        preemption=draw(st.booleans()),
        swap_tokens=draw(st.sampled_from([0, 20, 1000])),
        recompute_tokens=draw(st.sampled_from([0, 10])),
    )


def requests(name: str) -> st.SearchStrategy[Request]:
    return st.builds(
        Request,
        request_id=st.just(name),
        prompt_token_ids=st.lists(token_ids, min_size=1, max_size=12).map(tuple),
        max_tokens=st.integers(1, 16),
        constrained=st.sampled_from([False, False, True]),
        stop_token_ids=st.frozensets(token_ids, max_size=1),
        priority=st.sampled_from([0, 0, -1, 2]),
    )


class SpeculatingMachine(RuleBasedStateMachine):
    """Widths change while requests arrive, end, lose their slots and are read late."""

    @initialize(config=configs())
    def begin(self, config: SchedulerConfig) -> None:
        self.loop = Loop(config)

    @rule(number=st.integers(0, 7), data=st.data())
    def submit(self, number: int, data: st.DataObject) -> None:
        if f"r{number}" not in self.loop.live:
            self.loop.submit(data.draw(requests(f"r{number}")))

    @rule(speculation=speculations, turns=st.integers(1, 6), lag=st.integers(0, 3))
    def turns(self, speculation: Speculation | None, turns: int, lag: int) -> None:
        self.loop.speculation = speculation
        for _ in range(turns):
            self.loop.turn(lag)

    @rule(speculation=speculations)
    def plan(self, speculation: Speculation | None) -> None:
        self.loop.speculation = speculation
        self.loop.plan()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def commit(self) -> None:
        self.loop.commit()

    @rule(number=st.integers(0, 7), how=st.sampled_from([None, "park", "replay"]), to_back=st.booleans())
    def preempt(self, number: int, how: str | None, to_back: bool) -> None:
        if f"r{number}" in self.loop.live:
            self.loop.preempt(f"r{number}", how=how, to_back=to_back)

    @rule(number=st.integers(0, 7), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def finish(self, number: int, reason: FinishReason) -> None:
        self.loop.finish(f"r{number}", reason)

    @rule()
    def restart(self) -> None:
        self.loop.restart()

    @invariant()
    def holds(self) -> None:
        self.loop.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.drain(1)


TestSpeculatingMachine = SpeculatingMachine.TestCase
TestSpeculatingMachine.settings = settings(QUICK, max_examples=80, stateful_step_count=40)


@pytest.mark.full
@settings(QUICK, max_examples=40)
@given(data=st.data(), config=configs(), count=st.integers(1, 6), lag=st.integers(0, 3))
def test_speculation_brings_the_same_tokens_in_fewer_steps(
    data: st.DataObject, config: SchedulerConfig, count: int, lag: int
) -> None:
    submitted = [replace(data.draw(requests(f"r{number}")), max_tokens=16) for number in range(count)]
    steps = []
    for speculation in (None, Speculation(5, 4)):
        loop = Loop(config)
        loop.speculation = speculation
        for request in submitted:
            loop.submit(request)
        loop.drain(lag)
        assert {life.request.request_id for life in loop.ended} == {each.request_id for each in submitted}
        # All steps: the one of a prompt's last chunk verifies too, even if the first token turns out to be the last.
        steps.append(sum(not plan.is_empty for plan in loop.plans))
        assert speculation is not None or not any(plan.verify for plan in loop.plans)
    if config.num_blocks is None and not config.preemption and lag == 0:
        assert steps[1] <= steps[0]


def test_without_speculation_plans_are_what_they_were() -> None:
    """No plan has verify rows, and the decode rows are the same tuple from step to step."""
    loop = Loop(SchedulerConfig(max_num_seqs=2, chunk_size=4, max_num_batched_tokens=16))
    for name in "ab":
        loop.submit(Request(request_id=name, prompt_token_ids=(1, 2, 3), max_tokens=8))
    loop.drain(1)
    assert all(
        (plan.verify, plan.width, plan.to_decode, plan.to_speculate) == ((), 0, (), ()) for plan in loop.plans
    )
    assert loop.plans[2].decode is loop.plans[3].decode


def test_too_many_rows_decode_one_token_each() -> None:
    loop = Loop(SchedulerConfig(max_num_seqs=3, chunk_size=4, max_num_batched_tokens=64))
    loop.speculation = Speculation(4, 2)
    for name in "abc":
        loop.submit(Request(request_id=name, prompt_token_ids=(1, 2, 3), max_tokens=4))
    plan = loop.turn()
    assert not plan.decode and [row.width for row in plan.verify] == [1, 1, 1] and plan.width == 1
    loop.drain()


def test_more_samples_than_planned_are_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, chunk_size=4, max_num_batched_tokens=64))
    loop = Loop(scheduler.config)
    loop.speculation = Speculation(2, 1)
    loop.submit(Request(request_id="a", prompt_token_ids=(1, 2, 3), max_tokens=9))
    plan = loop.plan()
    (_, result) = loop.in_flight[0]
    assert len(plan.verify) == 1
    wrong = StepResult(first=result.first, verify=[[result.first[0]] * 3])
    with pytest.raises(ResultMismatchError, match="2 were planned"):
        loop.scheduler.commit(plan, wrong)


def _hammer() -> None:
    """Random load of every kind, from one seed."""
    for seed in range(40):
        config = SchedulerConfig(
            max_num_seqs=3,
            chunk_size=4,
            max_num_batched_tokens=16,
            num_blocks=[None, 14][seed % 2],
            block_size=4,
            enable_prefix_caching=True,
            prefill_equals_decode=True,
            preemption=True,
        )
        loop = Loop(config)
        for number in range(8):
            prompt = tuple((seed + number // 2 + at) % VOCABULARY for at in range(3 + number))
            loop.submit(Request(request_id=str(number), prompt_token_ids=prompt, max_tokens=12))
            loop.speculation = [Speculation(4, 3), None][(seed + number) % 3 == 0]
            loop.turn(1)
            if number % 3 == 2:
                loop.preempt(str(number - 1), how=[None, "park"][seed % 2])
        loop.speculation = Speculation(5, 3)
        loop.drain(seed % 3)


def test_the_hammer_finds_nothing() -> None:
    _hammer()


@pytest.mark.parametrize("fault", ["upper bound", "room", "late tokens", "low bound"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws can fail: each of these faults has corrupted some engine."""
    if fault == "upper bound":  # a parked row leaves behind what it got beyond the lower bound
        plain = RequestState.position

        def position(self: RequestState, next_step: int) -> int:
            kept, self.widths = self.widths, []
            try:
                return plain(self, next_step)
            finally:
                self.widths = kept

        monkeypatch.setattr(RequestState, "position", position)
    elif fault == "room":  # drafts are written behind the row's blocks
        monkeypatch.setattr(Speculating, "_room", lambda self, state, width, step: width)
    elif fault == "late tokens":  # tokens behind the one that ends a request are credited too
        monkeypatch.setattr(Committer, "_reason", staticmethod(lambda state, token_id, *, capped: None))
    else:  # a slot is given away when its row might be done, not when it must be
        monkeypatch.setattr(
            Speculating,
            "done",
            lambda self: tuple(
                state for state in self if state.credited + sum(state.widths) >= state.request.max_tokens
            ),
        )
    with pytest.raises((AssertionError, ResultMismatchError, KeyError)):
        _hammer()


def test_the_first_plan_of_a_prompt_may_verify() -> None:
    """One step samples the row's first token and verifies its first draft."""
    loop = Loop(SchedulerConfig(max_num_seqs=1, chunk_size=4, max_num_batched_tokens=64))
    loop.speculation = Speculation(4, 1)
    loop.submit(Request(request_id="a", prompt_token_ids=(5, 2, 3), max_tokens=9))
    plan: Plan = loop.turn()
    assert plan.chunks and plan.verify and not plan.decode
    loop.drain(2)
