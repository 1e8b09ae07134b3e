"""Random sequences of all that a caller may do, with prompts that begin alike and too few slots and blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.fake_loop import Loop
from tests.support.fake_runner import VOCABULARY, FakeRunner, expected
from xla_engine.scheduler import Plan, Request, SchedulerConfig

TREE = random.Random(7)
STEMS = [tuple(TREE.randrange(VOCABULARY) for _ in range(24)) for _ in range(2)]


def draw_config(draw: random.Random) -> SchedulerConfig:
    config = _draw_config(draw)
    if draw.random() < 0.5:  # the largest request takes 36 + 8 tokens
        blocks = -(-draw.choice((44, 50, 60, 90)) // config.block_size)
        stores = config.enable_prefix_caching and draw.random() < 0.5
        return replace(config, num_blocks=blocks, stores_blocks=stores)
    return config


def _draw_config(draw: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=draw.randint(1, 4),
        chunk_size=draw.choice((2, 3, 4)),
        max_num_batched_tokens=draw.choice((4, 12, 40)),
        priority_aging=draw.choice((1, 3)),
        enable_prefix_caching=draw.random() < 0.8,
        block_size=draw.choice((1, 2, 4)),
        prefill_equals_decode=draw.random() < 0.6,
        cut_invariant=draw.random() < 0.6,
        preemption=draw.random() < 0.6,
        swap_tokens=draw.choice((0, 20, 1 << 20)),
        recompute_tokens=draw.choice((0, 8, 100)),
    )


def draw_request(draw: random.Random, name: str, sampled: list[tuple[int, ...]]) -> Request:
    """A prompt that begins as others do, perhaps as one that went on: a conversation."""
    stem = draw.choice(STEMS)[: draw.choice((0, 3, 4, 8, 12, 24))]
    if sampled and draw.random() < 0.3:
        stem = draw.choice(sampled)[:30]
    tail = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 0, 1, 2, 5))))
    return Request(
        request_id=name,
        prompt_token_ids=(stem + tail) or (1,),
        max_tokens=draw.randint(1, 8),
        stop_token_ids=frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 0, 1)))),
        constrained=draw.random() < 0.2,
        cache_salt=draw.choice(("", "", "", "tenant")),
        max_cached_tokens=draw.choice((None,) * 8 + (0, draw.randrange(64))),
        priority=draw.choice((0, 0, 0, -2, 1, 10)),
    )


def adversary(draw: random.Random, turns: int = 14, config: SchedulerConfig | None = None) -> Loop:
    """Submit, abort, resubmit, preempt, restart, and clear the cache at every step, at a lag of 0 to 3."""
    config = config or draw_config(draw)
    loop = Loop(config)
    loop.draw = draw
    lag = draw.randint(0, 3)
    sampled: list[tuple[int, ...]] = []
    for _ in range(turns):
        for _ in range(draw.choice((0, 1, 1, 3))):
            name = f"r{draw.randrange(6)}"
            if draw.random() < 0.3:
                loop.finish(name)
            if name not in loop.live:
                request = draw_request(draw, name, sampled)
                loop.submit(request)
                tokens = tuple(found.token_id for found in expected(request)[0])
                sampled.append((*request.prompt_token_ids, *tokens))
        for name in list(loop.live):
            if draw.random() < 0.15:
                how = draw.choice((None, "park", "replay", *(["recompute"] if config.keeps_tokens else [])))
                loop.preempt(name, how=how, to_back=draw.random() < 0.3)
        if draw.random() < 0.02:
            loop.restart()
        if draw.random() < 0.02:
            loop.scheduler.reset_prefix_cache()
        loop.blocked = frozenset(name for name in loop.live if draw.random() < 0.3)
        loop.turn(lag)
        loop.scheduler.check()
    return loop


def assert_caught() -> None:
    """At least one of a few hundred adversarial runs detects the fault that was planted."""
    for seed in range(300):
        try:
            adversary(random.Random(seed)).drain()
        except (AssertionError, KeyError, IndexError):
            return
    raise AssertionError("the fault went unnoticed")


def assert_caught_in_plans(fault: Callable[[Plan], Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same if the device runs `fault(plan)` in place of each plan."""
    start = FakeRunner.start
    monkeypatch.setattr(FakeRunner, "start", lambda self, plan: start(self, fault(plan)))
    assert_caught()
