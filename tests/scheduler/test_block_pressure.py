"""Blocks are shared, grow and run out: which request gets them, which is preempted, and how long one waits at most."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.adversary import assert_caught, assert_caught_in_plans
from tests.support.fake_loop import Loop
from tests.support.fake_runner import expected
from tests.support.policy_loop import PolicyLoop
from xla_engine.scheduler import Plan, Request, SchedulerConfig
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.block_pool import BlockPool
from xla_engine.scheduler.kv.prefix_cache import BlockHashes
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.scheduler.request_state import RequestState

BASE = {"chunk_size": 4, "max_num_batched_tokens": 64, "block_size": 4, "priority_aging": 4}


def loop(slots: int, num_blocks: int, **options: object) -> Loop:
    fields = BASE | {"enable_prefix_caching": True, "num_blocks": num_blocks} | options
    return Loop(SchedulerConfig(max_num_seqs=slots, **fields))  # type: ignore[arg-type]


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 4, **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def held(driven: Loop) -> int:
    """Blocks that some request holds."""
    blocks = driven.scheduler.kv.blocks
    assert blocks is not None
    return blocks.pool.num_blocks - blocks.pool.num_free


def lasting(length: int, tokens: int, first: int = 0) -> tuple[int, ...]:
    """A prompt of `length` tokens that begins with `first`; after so many more tokens, none can be chosen."""
    draw = random.Random(first)
    while True:
        prompt = (first, *(draw.randrange(13) for _ in range(length - 1)))
        if len(expected(request("x", prompt, tokens))[0]) == tokens:
            return prompt


STEM = lasting(10, 8, first=3)


@pytest.mark.parametrize("exact", [False, True])
def test_samples_of_one_prompt_share_its_pages(exact: bool) -> None:
    """Ten tokens are two and a half blocks. The first sequence computes them. The others share the two blocks, and
    copy the half if a last chunk of one token is exact; otherwise they compute the chunk with the last token."""
    driven = loop(4, 40, cut_invariant=exact)
    for index in range(4):
        driven.submit(request(f"r{index}", STEM, max_tokens=6))
    first, second = driven.turn(), driven.turn()
    assert {chunk.request_id for chunk in first.chunks} == {"r0"}, "the others wait for what is coming"
    assert [reuse.length for reuse in second.moves.reuses] == [9 if exact else 8] * 3
    assert len(second.moves.copies) == (3 if exact else 0)
    assert held(driven) == 2 + 4 * 1
    assert {slot.blocks[:2] for slot in driven.scheduler.snapshot().slots} == {(0, 1)}
    driven.drain()


def test_a_prompt_that_is_known_computes_its_last_token_in_a_copy() -> None:
    driven = loop(2, 40, cut_invariant=True)
    driven.submit(request("a", STEM[:8], max_tokens=1))
    driven.drain()
    driven.submit(request("b", STEM[:8], max_tokens=1))
    plan = driven.turn()
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(7, 1)]
    assert len(plan.moves.copies) == 1, "the second block is written, and may be found meanwhile"
    driven.drain()


@pytest.mark.parametrize("ends", ["in its slot", "when its slot is another's"])
def test_what_a_request_generated_is_found_by_the_next_turn_of_a_conversation(ends: str) -> None:
    """A stop token ends it while it has blocks, its limit after it released them. Both stay cached until reused."""
    sampled = [found.token_id for found in expected(request("x", STEM, 5))[0]]
    stops = frozenset({sampled[4]} if ends == "in its slot" else ())
    assert sampled.index(sampled[4]) == 4
    driven = loop(2, 40, prefill_equals_decode=True)
    driven.submit(request("a", STEM, max_tokens=9 if stops else 5, stop_token_ids=stops))
    driven.drain(lag=1)
    driven.submit(request("b", (*STEM, *sampled, 7, 7), max_tokens=1))
    (reuse,) = driven.turn().moves.reuses
    assert reuse.length == 12, "of 15 tokens the last has no keys, so three blocks are whole"
    driven.drain()


def test_tenants_and_models_share_nothing() -> None:
    driven = loop(2, 40)
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        driven.submit(request(name, STEM, max_tokens=1, cache_salt=salt))
        driven.drain()
    assert [reuse.request_id for plan in driven.plans for reuse in plan.moves.reuses] == ["c", "d"]
    one, another = (
        BlockHashes(4, model, tails=True).of_context(
            RequestState(request=request("x", STEM), arrival=0, turn=0)
        )
        for model in ("one", "another")
    )
    assert len(one) == 3 and not set(one) & set(another)


def test_a_forgotten_prefix_is_computed_again_and_one_in_use_is_not_lost() -> None:
    driven = loop(3, 40)
    driven.submit(request("a", STEM, max_tokens=6))
    driven.turn()
    driven.submit(request("b", STEM, max_tokens=6))
    driven.turn()
    driven.scheduler.reset_prefix_cache()
    driven.submit(request("c", STEM, max_tokens=6))
    assert not driven.turn().moves.reuses
    driven.drain()


def test_pages_without_a_name_go_before_those_with_one_and_these_by_their_last_use() -> None:
    driven = loop(1, 8)
    prompts = [(index, *STEM[:7]) for index in range(3)]  # two blocks each, and one of tokens
    for at in (0, 1, 0, 2):
        driven.submit(request(f"r{len(driven.plans)}", prompts[at], max_tokens=1))
        driven.drain()
    # takes the two blank blocks and both of prompt 1
    driven.submit(request("wide", (12,) * 13, max_tokens=1))
    driven.drain()
    found = []
    for at in (0, 2, 1):
        driven.submit(request(f"r{len(driven.plans)}", prompts[at], max_tokens=1))
        found.append(sum(reuse.length for reuse in driven.turn().moves.reuses))
        driven.drain()
    assert found == [4, 4, 0]


def test_the_last_in_line_gives_way_and_nobody_computes_for_nothing() -> None:
    """Of two requests of six blocks in a pool of eight, the second is parked once and resumes when the first ends."""
    prompts = [lasting(4, 20, first) for first in (1, 5)]
    driven = loop(2, 8)
    for name, prompt in zip("ab", prompts, strict=True):
        driven.submit(request(name, prompt, max_tokens=20))
    driven.drain(lag=1)
    lost = [each for plan in driven.plans for each in plan.decisions if each.action in WAYS_TO_PREEMPT]
    assert [(each.request_id, each.action) for each in lost] == [("b", "park")]
    assert driven.runner.prefilled == 8


def test_a_request_that_began_again_for_want_of_pages_waits_until_it_has_what_it_had() -> None:
    """Otherwise it would get its prompt's blocks at once, run to the same position, and lose them again and again."""
    prompts = [lasting(4, 20, first) for first in (1, 5)]
    driven = loop(2, 8, swap_tokens=0)
    for name, prompt in zip("ab", prompts, strict=True):
        driven.submit(request(name, prompt, max_tokens=20))
    driven.drain(lag=1)
    assert driven.preempted == {"replay": 1}


def test_rows_in_constrained_grow_as_well() -> None:
    driven = loop(2, 12)
    driven.submit(request("a", lasting(4, 20, 1), max_tokens=20, constrained=True))
    driven.submit(request("b", lasting(4, 20, 5), max_tokens=20))
    driven.drain(lag=2)
    assert driven.preempted.total() == 0


def test_the_next_in_line_takes_the_pages_of_a_later_one_where_it_may() -> None:
    driven = loop(4, 6, preemption=True)
    driven.submit(request("late", lasting(12, 12), max_tokens=12, priority=10))
    driven.turn()
    driven.submit(request("soon", tuple(range(13)), max_tokens=2, priority=-10))
    plan = driven.turn()
    assert plan.admitted == ("soon",) and driven.preempted.total() == 1, "six blocks do not hold both"
    driven.drain()


def test_nobody_waits_longer_than_those_before_it_run() -> None:
    """Requests arrive without end, and the pool holds little more than one. Each of the k requests before one in line,
    and of those that had blocks when it arrived, runs from beginning to end at most once before it ends."""
    slots, longest = 3, 6 + 10 + 3  # chunks, tokens, lag and a step to be read
    for seed in range(25):
        draw = random.Random(seed)
        driven = loop(
            slots,
            draw.choice((9, 12)),
            preemption=draw.random() < 0.5,
            swap_tokens=draw.choice((0, 1 << 20)),
            prefill_equals_decode=draw.random() < 0.5,
        )
        limit: dict[str, int] = {}
        lag = draw.randint(0, 2)
        for turn in range(150):
            if draw.random() < 0.4 and len(driven.live) < 12:
                name = str(turn)
                stem = STEM if draw.random() < 0.5 else ()
                prompt = (*stem, *(draw.randrange(13) for _ in range(draw.randint(1, 13))))
                limit[name] = turn + (len(driven.live) + slots + 1) * longest
                driven.submit(request(name, prompt, max_tokens=draw.randint(1, 10)))
            driven.turn(lag)
            assert all(turn <= limit[name] for name in driven.live), "a request waits too long"
        driven.drain(lag)


@pytest.mark.parametrize("policy", ["shortest_prompt", "deadline", "longest_prefix", "round_robin"])
def test_under_policies_of_no_fixed_order_the_oldest_keeps_its_pages(policy: str) -> None:
    fields = BASE | {"num_blocks": 10, "quantum": 3, "swap_tokens": 0, "priority_aging": 2}
    driven = PolicyLoop(SchedulerConfig(max_num_seqs=3, scheduling_policy=policy, **fields))  # type: ignore[arg-type]
    driven.submit(request("old", lasting(12, 20), max_tokens=20))
    for turn in range(60):
        driven.submit(request(str(turn), (turn % 13, 6), max_tokens=9))
        driven.turn(1)
        taken = [each.request_id for each in driven.plans[-1].decisions if each.action in WAYS_TO_PREEMPT]
        assert "old" not in taken
        if "old" not in driven.live:
            break
    assert "old" not in driven.live and driven.preempted.total() > 0
    driven.drain()


def no_copies(plan: Plan) -> Plan:
    return replace(plan, moves=replace(plan.moves, copies=()))


def no_growth(plan: Plan) -> Plan:
    return replace(
        plan, moves=replace(plan.moves, tables=tuple(table for table in plan.moves.tables if not table.start))
    )


def parked_out_of_order(plan: Plan) -> Plan:
    return replace(
        plan,
        moves=replace(
            plan.moves, parks=tuple(replace(swap, blocks=swap.blocks[::-1]) for swap in plan.moves.parks)
        ),
    )


@pytest.mark.parametrize("fault", [no_copies, no_growth, parked_out_of_order])
def test_a_plan_that_moves_pages_wrongly_is_caught(
    fault: Callable[[Plan], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught_in_plans(fault, monkeypatch)


def share_as_if_alone(self: BlockPool, block: int) -> None:
    """The fault: sharing sets the count of holders to one, and the first to end frees the block of all."""
    if not self._holders[block]:
        del self._kept[block]
    self._holders[block] = 1


def evict_without_removing_keys(self: BlockPool, block: int) -> None:
    """The fault: a block that is allocated again is still found by its old content."""


def name_ahead(self: BlockManager, state: object, length: int) -> int:
    """The fault: a block is cached before all of it is written."""
    return self.pool.blocks_for(length)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (BlockPool, "share", share_as_if_alone),
        (BlockPool, "_remove_keys", evict_without_removing_keys),
        (BlockManager, "_filled", name_ahead),
    ],
)
def test_a_pool_that_forgets_or_remembers_wrongly_is_caught(
    owner: type, name: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert_caught()
