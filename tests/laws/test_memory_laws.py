"""Reuse and preemption under arbitrary calls: adversarial sequences on the stand-in device.

`tests.support.fake_runner` refuses a hit that is stale, a slot that is taken while it is in use, a gap in what is
resumed, and a request that returns anything but what it returns alone. Prompts are drawn to begin alike, few slots are
thrashed, and requests lose their slots at random steps in random ways.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.adversary import adversary
from tests.support.fake_loop import Loop
from xla_engine.scheduler import FinishReason
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT


def tally(loop: Loop) -> Counter[str]:
    """How often a sequence reached the situations that the laws are about."""
    plans = loop.plans
    counters = loop.scheduler.snapshot().counters
    counts = Counter(
        {
            "steps": len(plans),
            "requests": len(loop.ended),
            "aborted": sum(life.reason is FinishReason.ABORT for life in loop.ended),
            "prefix tokens found": counters.cached_tokens,
            "requests resumed from the host": sum(len(plan.moves.resumes) for plan in plans),
            "slots lost to another request": sum(
                each.action in WAYS_TO_PREEMPT for plan in plans for each in plan.decisions
            ),
        }
    )
    counts.update({f"lost a slot: {how}": loop.preempted[how] for how in WAYS_TO_PREEMPT})
    if loop.scheduler.config.num_blocks is None:
        reuses = [reuse for plan in plans for reuse in plan.moves.reuses]
        counts["prefixes reused in place"] = sum(reuse.source == reuse.slot.index for reuse in reuses)
        counts["prefixes copied"] = sum(reuse.source != reuse.slot.index for reuse in reuses)
        return counts
    counts["sequences with blocks"] = 1
    counts["prefixes found in blocks"] = sum(len(plan.moves.reuses) for plan in plans)
    counts["blocks copied on write"] = sum(len(plan.moves.copies) for plan in plans)
    counts["tables grown"] = sum(table.start > 0 for plan in plans for table in plan.moves.tables)
    counts["slots lost for want of blocks"] = counts["slots lost to another request"]
    counts["blocks shared on return"] = sum(
        -1 in swap.blocks for plan in plans for swap in plan.moves.resumes
    )
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


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.full)], ids=["few", "some"]
)
def test_adversarial_sequences_give_no_stale_hit_and_lose_nothing(seeds: range) -> None:
    check_all(seeds)


@pytest.mark.release
def test_ten_thousand_adversarial_sequences() -> None:
    check_all(range(10_000, 20_000))
