"""`peek` predicts the next plan and changes nothing."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.adversary import adversary
from tests.support.fake_loop import Loop
from tests.support.policy_loop import PolicyLoop
from tests.support.scheduler_calls import ask, make
from tests.support.small_loops import BASE, loop, request
from tests.support.storms import storm
from tests.support.tiers import default
from xla_engine.scheduler import FinishReason, Scheduler, SchedulerConfig
from xla_engine.scheduler.peek import peek


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Loop` that peeks before each plan and compares the two."""
    monkeypatch.setattr(Loop, "peeks", True)


@pytest.mark.parametrize("seed", default(range(40), 10))
def test_what_is_foreseen_is_what_comes(seed: int) -> None:
    """This holds with preemption, blocks, prefix caches, speculation, priorities, deadlines, aborts and restarts."""
    storm(random.Random(seed)).drain()
    adversary(random.Random(seed)).drain()


@pytest.mark.parametrize("policy", ["round_robin", "shortest_prompt", "deadline", "longest_prefix", "fcfs"])
def test_every_policy_is_foreseen(policy: str) -> None:
    options = BASE | {"enable_prefix_caching": True, "scheduling_policy": policy, "quantum": 3}
    driven = PolicyLoop(SchedulerConfig(max_num_seqs=2, **options))  # type: ignore[arg-type]
    for number in range(60):
        driven.submit(request(f"r{number}", (number % 3,) * (1 + number % 7), max_tokens=1 + number % 9))
        driven.turn(1)
    driven.drain(1)


def test_why_the_others_wait() -> None:
    engine = make(slots=1, chunk=2, budget=5)
    for name in "abc":
        engine.submit(ask(name, prompt=6, tokens=3))
    seen = peek(engine)
    assert seen.plan.admitted == ("a",) and [chunk.start for chunk in seen.plan.chunks] == [0, 2]
    assert seen.why_not == {"b": "no free slot: 1 of 1 busy", "c": "1 goes first"}
    assert engine.counters().steps_planned == 0 and engine.snapshot().slots[0].request is None
    assert "no free slot" in seen._repr_html_()


def test_requests_whose_time_is_up_are_named() -> None:
    driven = loop(1)
    driven.submit(request("a", deadline=5.0))
    driven.submit(request("b", queue_deadline=3.0))
    seen = peek(driven.scheduler, now=4.0)
    assert seen.expired == (("b", FinishReason.QUEUE_TIMEOUT),) and "b" not in seen.why_not
    assert peek(driven.scheduler, now=6.0).plan.is_empty
    assert peek(driven.scheduler, now=2.0).expired == ()
    assert driven.scheduler.snapshot().counters.finished[FinishReason.DEADLINE] == 0
    driven.drain()


def test_what_is_left_of_a_turn() -> None:
    options = BASE | {"scheduling_policy": "round_robin", "quantum": 5}
    driven = PolicyLoop(SchedulerConfig(max_num_seqs=1, **options))  # type: ignore[arg-type]
    driven.submit(request("a", max_tokens=20))
    driven.submit(request("b", max_tokens=20))
    driven.turn()
    left = []
    for _ in range(4):
        (slot,) = driven.scheduler.snapshot().slots
        assert slot.request is not None
        left.append((slot.request.request_id, slot.request.quantum_left))
        driven.turn()
    assert left == [("a", 5), ("a", 4), ("a", 3), ("a", 2)]
    assert all(view.quantum_left is None for view in driven.scheduler.snapshot().waiting)
    driven.drain()


def test_a_long_queue_costs_little() -> None:
    """It takes microseconds for each waiting request; a copy of every prompt would take seconds."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, chunk_size=16, max_num_batched_tokens=64))
    for number in range(2000):
        scheduler.submit(request(f"r{number}", tuple(range(2000)), max_tokens=4))
    began = time.thread_time()
    seen = peek(scheduler)
    assert time.thread_time() - began < 1.0
    assert len(seen.plan.admitted) == 4 and len(seen.why_not) == 1999  # one prompt fills the step
