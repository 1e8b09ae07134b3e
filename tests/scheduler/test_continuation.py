"""Requests that continue after their end, in their slot, from their tokens, or sampled again: the same stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_loop import Life
from tests.support.fake_runner import expected
from tests.support.policy_loop import PolicyLoop
from tests.support.profiles import examples
from tests.support.scheduler_calls import ask, make, step
from xla_engine.scheduler import (
    FinishReason,
    QueueFullError,
    Request,
    Scheduler,
    SchedulerConfig,
    Speculation,
)
from xla_engine.scheduler.continuation import forget_slots, go_on

SIZES = {"max_num_seqs": 3, "chunk_size": 4, "max_num_batched_tokens": 20, "block_size": 4}
FORMS: tuple[dict[str, object], ...] = (
    {},
    {"enable_prefix_caching": True},
    {"enable_prefix_caching": True, "prefill_equals_decode": True},
    {"prefill_equals_decode": True, "cut_invariant": True, "enable_prefix_caching": True},
    {"num_blocks": 14},
    {"num_blocks": 14, "enable_prefix_caching": True, "prefill_equals_decode": True},
    {"scheduling_policy": "round_robin", "quantum": 3},
)
seen: Counter[str] = Counter()


class ContinuingLoop(PolicyLoop):
    """The loop of the fake engine, with requests that continue after their end."""

    def go_on(self, old: Life, more: int) -> None:
        had = [sample.token_id for sample in old.samples]
        request = replace(old.request, max_tokens=len(had) + more)
        replays = go_on(self.scheduler, request, had)
        life = Life(request, self.place(request.priority))
        life.samples = [] if replays else list(old.samples)
        self.live[request.request_id] = life
        self.queue[request.request_id] = life.place
        self.arrivals += 1
        self.runner.requests[request.request_id] = request
        self.ended.remove(old)


@settings(max_examples=examples(60, 150), deadline=None)
@given(st.sampled_from(FORMS), st.integers(0, 2), st.booleans(), st.data())
def test_pieces_add_up_to_the_longer_request(
    form: dict[str, object], lag: int, speculates: bool, data: st.DataObject
) -> None:
    """Each piece ends like a request of that length, and the slot contains what the scheduler says."""
    config = SchedulerConfig(**{**SIZES, **form, "keeps_finished": True})  # type: ignore[arg-type]
    loop = ContinuingLoop(config)
    if speculates:
        loop.speculation = Speculation(3, 3)
    for number in range(data.draw(st.integers(2, 7))):
        prompt = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=9)))
        stops = frozenset(data.draw(st.sets(st.integers(0, 12), max_size=2)))
        gated = data.draw(st.booleans())
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            max_tokens=data.draw(st.integers(1, 6)),
            stop_token_ids=stops,
            constrained=gated,
        )
        loop.submit(request)
    for _ in range(data.draw(st.integers(5, 40))):
        plan = loop.turn(lag)
        seen.update(decision.action for decision in plan.decisions)
        seen["replays"] += len(plan.moves.replays)
        loop.scheduler.check()
        over = [life for life in loop.ended if life.reason in (FinishReason.LENGTH, FinishReason.ABORT)]
        if over and data.draw(st.booleans()):
            old = data.draw(st.sampled_from(over))
            if len(old.samples) < 24:
                loop.go_on(old, data.draw(st.integers(1, 5)))
        elif loop.live and data.draw(st.integers(0, 9)) == 0:
            loop.finish(data.draw(st.sampled_from(sorted(loop.live))))
    loop.drain(lag)
    for life in loop.ended:
        samples, reason = expected(life.request)
        if life.reason is not FinishReason.ABORT:
            assert life.samples == samples and life.reason is reason, life


def test_every_way_to_go_on_was_seen() -> None:
    assert seen["continue"] > 20 and seen["prefill"] > 100 and seen["replays"] > 5, seen


def ended(scheduler: Scheduler) -> Request:
    request = ask("a")
    scheduler.submit(request)
    while scheduler.has_unfinished:
        step(scheduler)
    return replace(request, max_tokens=8)


def test_what_is_refused_changes_nothing() -> None:
    config = replace(make(1).config, keeps_finished=True, max_waiting=1)
    scheduler = Scheduler(config)
    longer = ended(scheduler)
    scheduler.submit(ask("b"))
    scheduler.submit(ask("c"))
    with pytest.raises(QueueFullError):
        go_on(scheduler, longer, [7] * 5)
    scheduler.check()
    assert set(scheduler.ended) == {"a"}
    with pytest.raises(ValueError, match="in use"):
        go_on(scheduler, replace(longer, request_id="b"), [])
    while scheduler.has_unfinished:
        step(scheduler)
    assert go_on(scheduler, longer, [7] * 5) is False  # in its slot, as far as is known here
    plan = scheduler.plan()
    assert (
        plan.moves.replays == ("a",) and not plan.moves.continues and plan.chunks
    )  # b and c had the slot since


def test_what_was_forgotten_or_lost_does_not_go_on_in_its_slot() -> None:
    for lose in (lambda s: s.ended.pop("a"), forget_slots):
        scheduler = Scheduler(replace(make(2).config, keeps_finished=True))
        longer = ended(scheduler)
        lose(scheduler)
        assert go_on(scheduler, longer, [7] * 5) is True  # all of its tokens are sampled again
        assert not scheduler.plan().moves.continues
    kept = Scheduler(make(2).config)
    ended(kept)
    assert not kept.ended
