"""Scheduling policies: the order and the bound of each, and law 1 under all of them."""

from __future__ import annotations

import doctest
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_runner import VOCABULARY
from tests.support.policy_loop import PolicyLoop
from tests.support.profiles import examples
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.schedule import draw_schedule, run_alone, run_schedule
from xla_engine.errors import ConfigError
from xla_engine.scheduler import FinishReason, Request, Sample, Scheduler, SchedulerConfig, StepResult, policy


def draw_config(draw: random.Random, name: str) -> SchedulerConfig:
    size = draw.choice((1, 2, 4))
    tokens = draw.choice((None, None, 34, 50))  # in blocks; the largest request takes 32
    return SchedulerConfig(
        max_num_seqs=draw.randint(1, 4),
        chunk_size=draw.choice((2, 4)),
        max_num_batched_tokens=draw.choice((4, 12, 40)),
        scheduling_policy=name,
        priority_aging=draw.choice((1, 3, 8)),
        quantum=draw.choice((1, 1, 2, 5)),
        enable_prefix_caching=draw.random() < 0.7,
        block_size=size,
        prefill_equals_decode=draw.random() < 0.5,
        swap_tokens=draw.choice((0, 12, 1 << 20)),
        num_blocks=None if tokens is None else -(-tokens // size),
    )


@pytest.mark.parametrize("name", policy.POLICIES)
@pytest.mark.parametrize(
    "seeds",
    [
        range(40),
        pytest.param(range(40, 200), marks=pytest.mark.full),
        pytest.param(range(200, 2200), marks=pytest.mark.release),
    ],
    ids=["few", "some", "many"],
)
def test_every_request_gets_what_it_gets_alone_under_each_policy(name: str, seeds: range) -> None:
    """Seeded random arrivals, aborts and deadlines, with a lag of 0 to 2."""
    for seed in seeds:
        draw = random.Random(f"{name}/{seed}")
        loop = PolicyLoop(draw_config(draw, name))
        lag = draw.randint(0, 2)
        stem = tuple(draw.randrange(VOCABULARY) for _ in range(12))
        for index in range(draw.randint(2, 14)):
            tail = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 1, 3, 9))))
            loop.submit(
                Request(
                    request_id=str(index),
                    prompt_token_ids=(stem[: draw.choice((0, 4, 12))] + tail) or (1,),
                    max_tokens=draw.randint(1, 12),
                    stop_token_ids=frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 0, 1)))),
                    constrained=draw.random() < 0.2,
                    priority=draw.choice((-1, 0, 2)),
                    deadline=draw.choice((None, None, loop.now + draw.randint(1, 9))),
                )
            )
            for _ in range(draw.choice((0, 0, 1, 4))):
                loop.turn(lag)
                loop.scheduler.check()
            if draw.random() < 0.15:
                loop.finish(str(draw.randrange(index + 1)), FinishReason.ABORT)
            if draw.random() < 0.3:
                loop.pass_time(1.0)
            if draw.random() < 0.03:
                loop.restart()
        loop.drain(lag)


def admitted(config: SchedulerConfig, requests: list[Request]) -> list[str]:
    """The order in which requests that all wait at once get slots."""
    loop = PolicyLoop(config)
    for request in requests:
        loop.submit(request)
    loop.drain()
    return [request_id for plan in loop.plans for request_id in plan.admitted]


def config_of(name: str, **changes: object) -> SchedulerConfig:
    sizes = {"max_num_seqs": 1, "chunk_size": 4, "max_num_batched_tokens": 40, "scheduling_policy": name}
    return SchedulerConfig(**sizes | changes)  # type: ignore[arg-type]


LINE = [  # (name, prompt tokens, priority, deadline)
    ("a", 9, 0, None),
    ("b", 2, 5, 70.0),
    ("c", 5, -5, 30.0),
    ("d", 2, 0, None),
    ("e", 7, 1, 50.0),
]


@pytest.mark.parametrize(
    ("name", "aging", "order"),
    [
        ("fcfs", 64, "abcde"),
        ("priority", 64, "cadeb"),
        ("shortest_prompt", 64, "bdcea"),
        ("shortest_prompt", 2, "bdace"),  # a waits for two others, no more
        ("deadline", 64, "cebad"),
        ("deadline", 1, "caebd"),
        ("longest_prefix", 64, "abcde"),  # nothing is cached
        ("round_robin", 64, "abcde"),
    ],
)
def test_order_of_a_line(name: str, aging: int, order: str) -> None:
    line = [
        Request(
            request_id=who, prompt_token_ids=(1,) * count, max_tokens=1, priority=priority, deadline=deadline
        )
        for who, count, priority, deadline in LINE
    ]
    assert "".join(admitted(config_of(name, priority_aging=aging), line)) == order


def test_longest_prefix_takes_who_has_most_in_the_cache() -> None:
    stem = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(16))

    def line(aging: int) -> list[str]:
        config = config_of("longest_prefix", enable_prefix_caching=True, block_size=4, priority_aging=aging)
        prompts = {
            "first": stem,
            "other": (1, 2, 3),
            "half": (*stem[:8], 1),
            "most": (*stem[:12], 1),
            "none": (5,),
        }
        return admitted(
            config,
            [
                Request(request_id=who, prompt_token_ids=prompt, max_tokens=1)
                for who, prompt in prompts.items()
            ],
        )

    assert line(64)[:2] == ["first", "most"]
    assert line(1)[:3] == ["first", "most", "other"]


@settings(max_examples=examples(25, 60), deadline=None)
@given(st.sampled_from(sorted(policy.UNBOUNDED)), st.integers(1, 4), st.data())
def test_nobody_is_passed_by_more_than_the_bound(name: str, aging: int, data: st.DataObject) -> None:
    """A request with k before it in the queue gets a slot within (k + 1) * (aging + 1) admissions."""
    scheduler = Scheduler(config_of(name, priority_aging=aging, enable_prefix_caching=True, block_size=4))
    submitted, taken, limit = 0, 0, {}
    for _ in range(60):
        for _ in range(data.draw(st.integers(0, 3))):
            limit[str(submitted)] = taken + (scheduler.num_waiting + 1) * (aging + 1)
            scheduler.submit(
                Request(
                    request_id=str(submitted),
                    prompt_token_ids=(1,) * data.draw(st.sampled_from((1, 2, 3, 30))),
                    max_tokens=1,
                    deadline=data.draw(st.sampled_from((None, 5.0, 90.0))),
                )
            )
            submitted += 1
        plan = scheduler.plan()
        for request_id in plan.admitted:
            taken += 1
            assert taken <= limit[request_id], f"{request_id} was passed by too many"
        scheduler.commit(plan, StepResult(first=[Sample(3)] * len(plan.first_rows)))
        scheduler.check()


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 6), st.integers(0, 2), st.data())
def test_round_robin_serves_everybody_again_within_its_bound(
    slots: int, requests: int, quantum: int, lag: int, data: st.DataObject
) -> None:
    """With R requests on B slots, each runs again within ceil(R / B) turns of `quantum` steps and the steps of the
    prompts in between; nothing is prefilled twice."""
    loop = PolicyLoop(config_of("round_robin", max_num_seqs=slots, quantum=quantum, max_num_batched_tokens=8))
    served: dict[str, list[int]] = {}
    for index in range(requests):
        prompt = tuple(range(data.draw(st.integers(1, 9))))
        loop.submit(
            Request(request_id=str(index), prompt_token_ids=prompt, max_tokens=data.draw(st.integers(1, 30)))
        )
        served[str(index)] = []
    chunks = sum(-(-len(life.request.prompt_token_ids) // 4) for life in loop.live.values())
    prompts = sum(len(life.request.prompt_token_ids) for life in loop.live.values())
    loop.drain(lag)
    for number, plan in enumerate(loop.plans):
        for part in (*plan.chunks, *plan.decode):
            served[part.request_id].append(number)
    bound = -(-requests // slots) * (quantum + lag + 1) + chunks
    for who, steps in served.items():
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        assert max(gaps, default=0) <= bound, f"{who} in steps {steps}"
    assert loop.runner.prefilled == prompts
    if quantum == 1 and sum(len(steps) > 12 for steps in served.values()) > slots:
        assert loop.preempted["park"] > 0


def test_round_robin_does_not_replay_where_the_host_has_no_room() -> None:
    loop = PolicyLoop(config_of("round_robin", quantum=1, swap_tokens=0))
    for name in "ab":
        loop.submit(Request(request_id=name, prompt_token_ids=(1, 2), max_tokens=9))
    loop.drain()
    assert not loop.preempted and loop.runner.prefilled == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduling_policy": "lifo"},
        {"scheduling_policy": "deadline", "preemption": True},
        {"scheduling_policy": "round_robin", "quantum": 0},
    ],
)
def test_policy_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"scheduling_policy|preemption|quantum"):
        config_of(**{"name": "fcfs", **wrong})  # type: ignore[arg-type]


def test_examples_in_the_policies_are_right() -> None:
    assert doctest.testmod(policy).failed == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_live_rows_stall_for_one_budget_and_prompts_start_within_the_chunks_before_them(
    slots: int, budget: int, data: st.DataObject
) -> None:
    """Every live row decodes in every step, beside at most max(1, (budget - rows) // chunk) chunks; a prompt in a slot
    with A chunks of older prompts before it and C of its own has its last one planned within A + C steps."""
    loop = PolicyLoop(config_of("fcfs", max_num_seqs=slots, max_num_batched_tokens=budget))
    for index in range(data.draw(st.integers(1, 10))):
        prompt = tuple(range(1, 1 + data.draw(st.integers(1, 20))))
        loop.submit(
            Request(request_id=str(index), prompt_token_ids=prompt, max_tokens=data.draw(st.integers(2, 9)))
        )
    lengths = {name: -(-len(life.request.prompt_token_ids) // 4) for name, life in loop.live.items()}
    loop.drain(1)
    done: dict[str, int] = {}
    due: dict[str, int] = {}
    left: dict[str, int] = {}  # chunks of prompts in slots
    for number, plan in enumerate(loop.plans):
        for name in plan.admitted:
            left[name] = lengths[name]
            due[name] = number + sum(left.values()) - 1
        for chunk in plan.chunks:
            left[chunk.request_id] -= 1
            if chunk.is_last:
                done[chunk.request_id] = number
                del left[chunk.request_id]
        rows = len(plan.decode)
        assert len(plan.chunks) <= max(1, (budget - rows + 1) // 4), plan
    assert all(done[name] <= due[name] for name in done) and len(done) == len(lengths)


def test_tokens_and_logprobs_are_those_of_alone_under_each_policy_on_the_device(tiny: XlaBatchEngine) -> None:
    """There are more requests than slots, some arrive later, and the quantum is 3."""
    usual = tiny.scheduler
    cases = draw_cases(tiny, 24, seed=11, max_new_tokens=12)
    alone = {case.request_id: run_alone(tiny, case) for case in cases}
    for name in policy.POLICIES:
        options = {"scheduling_policy": name, "quantum": 3, "priority_aging": 4, "preemption": False}
        tiny.scheduler = Scheduler(replace(usual.config, **options))
        found = run_schedule(tiny, draw_schedule(cases, 7, lag=1))
        for case in cases:
            mine, theirs = alone[case.request_id], found[case.request_id]
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs), (name, case)
        assert (tiny.scheduler.counters().preemptions > 0) == (name == "round_robin")
    tiny.scheduler = usual
    tiny.reset_prefix_cache()


def test_engine_refuses_a_policy_that_is_not() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        EngineConfig(scheduling_policy="lifo")
    with pytest.raises(ConfigError, match="quantum"):
        EngineConfig(quantum=0)
