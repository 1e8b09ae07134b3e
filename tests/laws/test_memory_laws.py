"""Reuse and preemption under anything a caller may do: adversarial sequences against the stand-in device.

`tests.support.fake_runner` refuses a hit that is stale, a slot that is taken while it is in use, a gap in what is
resumed, and a request that returns anything but what it returns alone. Prompts are drawn to begin alike, few slots are
thrashed, and requests lose their slots at random steps in random ways. The last part plants the faults that such
mechanisms have had elsewhere, and sees them caught.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.fake_runner import VOCABULARY, Loop, expected
from xla_engine.scheduler import FinishReason, Request, SchedulerConfig
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT

TREE = random.Random(7)
STEMS = [tuple(TREE.randrange(VOCABULARY) for _ in range(24)) for _ in range(2)]


def draw_config(draw: random.Random) -> SchedulerConfig:
    config = _draw_config(draw)
    if draw.random() < 0.5:  # the largest request takes 36 + 8 tokens
        return replace(config, num_blocks=-(-draw.choice((44, 50, 60, 90)) // config.block_size))
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
        host_gated=draw.random() < 0.2,
        cache_salt=draw.choice(("", "", "", "tenant")),
        reads_prefix_cache=draw.random() < 0.9,
        priority=draw.choice((0, 0, 0, -2, 1, 10)),
    )


def adversary(draw: random.Random, turns: int = 14) -> Loop:
    """Submit, abort, resubmit, preempt, restart, and clear the cache at every step, at a lag of 0 to 3."""
    config = draw_config(draw)
    loop = Loop(config)
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
        loop.turn(lag)
        loop.scheduler.check()
    return loop


def tally(loop: Loop) -> Counter[str]:
    """How often a sequence came to what the laws are about."""
    plans = loop.plans
    counters = loop.scheduler.snapshot().counters
    counts = Counter(
        {
            "steps": len(plans),
            "requests": len(loop.ended),
            "aborted": sum(life.reason is FinishReason.ABORT for life in loop.ended),
            "prefix tokens found": counters.cached_tokens,
            "requests resumed from the host": sum(len(plan.resumes) for plan in plans),
            "slots lost to another request": sum(
                each.action in WAYS_TO_PREEMPT for plan in plans for each in plan.decisions
            ),
        }
    )
    counts.update({f"lost a slot: {how}": loop.preempted[how] for how in WAYS_TO_PREEMPT})
    if loop.scheduler.config.num_blocks is None:
        reuses = [reuse for plan in plans for reuse in plan.reuses]
        counts["prefixes reused in place"] = sum(reuse.source == reuse.slot.index for reuse in reuses)
        counts["prefixes copied"] = sum(reuse.source != reuse.slot.index for reuse in reuses)
        return counts
    counts["sequences with pages"] = 1
    counts["prefixes found in pages"] = sum(len(plan.reuses) for plan in plans)
    counts["pages copied on write"] = sum(len(plan.copies) for plan in plans)
    counts["tables grown"] = sum(table.start > 0 for plan in plans for table in plan.tables)
    counts["slots lost for want of pages"] = counts["slots lost to another request"]
    counts["pages shared on return"] = sum(-1 in swap.blocks for plan in plans for swap in plan.resumes)
    return counts


def check_all(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        loop = adversary(random.Random(seed))
        loop.drain(lag=seed % 2)
        assert not loop.runner.host, "state of a request that is over stays on the host"
        counts.update(tally(loop))
    for what, count in counts.items():
        print(f"{what:<32} {count:>9,}")
        assert count > len(seeds) / 20, f"rare: {what}"


def test_adversarial_sequences_give_no_stale_hit_and_lose_nothing() -> None:
    check_all(range(400))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_adversarial_sequences() -> None:
    check_all(range(10_000, 20_000))
