"""Stored and reloaded blocks: requests get the same results as alone, whichever blocks can be read, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.adversary import adversary, assert_caught, assert_caught_in_plans
from tests.support.fake_loop import Loop
from xla_engine.scheduler import Plan, Request, Scheduler, SchedulerConfig, stored_blocks
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.readiness import LOADING
from xla_engine.scheduler.moves import StoredBlock
from xla_engine.scheduler.request_state import RequestState

CONFIG = SchedulerConfig(
    max_num_seqs=2,
    chunk_size=4,
    max_num_batched_tokens=64,
    enable_prefix_caching=True,
    block_size=4,
    num_blocks=20,
    cut_invariant=True,
    prefill_equals_decode=True,
    stores_blocks=True,
)
STEM = tuple(index % 13 for index in range(16))


def request(name: str, prompt: tuple[int, ...], **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, max_tokens=2, **fields)  # type: ignore[arg-type]


def stored() -> Loop:
    """A loop whose first four blocks of `STEM` were stored, and whose pool has lost them."""
    loop = Loop(CONFIG)
    for name in "ab":
        loop.submit(request(name, (*STEM, ord(name) % 13)))
        loop.drain()
    loop.scheduler.reset_prefix_cache()
    assert len(loop.runner.outside) == 4
    return loop


def missing(scheduler: Scheduler) -> list[StoredBlock]:
    """What the request lacks that is next in line."""
    waiting = stored_blocks.waiting(scheduler)
    assert waiting is not None
    return stored_blocks.missing_blocks(scheduler, waiting)


def test_a_block_is_stored_when_a_second_request_shares_it_and_only_then() -> None:
    loop = Loop(CONFIG)
    loop.submit(request("first", (*STEM, 1)))
    loop.drain()
    assert not loop.runner.outside
    for name in ("second", "third"):
        loop.submit(request(name, (*STEM, 2, 3)))
        loop.drain()
    assert [each.tokens for plan in loop.plans for each in plan.moves.stores] == [
        STEM[at : at + 4] for at in range(0, 16, 4)
    ]


def test_stored_blocks_take_the_place_of_prefill() -> None:
    loop = stored()
    before = loop.runner.prefilled
    loop.draw.random = lambda: 0.0  # type: ignore[method-assign]
    loop.submit(request("c", (*STEM, 5)))
    loop.drain()
    assert loop.loaded == 4 and loop.runner.prefilled == before + 1


def test_the_request_waits_for_its_blocks_and_others_go_on() -> None:
    scheduler = stored().scheduler
    scheduler.submit(request("c", (*STEM, 5), stored_blocks=4))
    scheduler.submit(request("d", (7, 7)))
    assert scheduler.plan().is_empty and scheduler.awaits_blocks == "c"
    decision = scheduler.snapshot().waiting[0].decision
    assert decision is not None and decision.reason == LOADING
    assert stored_blocks.load(scheduler, "nobody", {b"x"}) == ()
    (first, *_) = missing(scheduler)
    assert [each.key for each in stored_blocks.load(scheduler, "c", {first.key})] == [first.key]
    plan = scheduler.plan()
    assert plan.admitted == ("c", "d") and [each.key for each in plan.moves.loads] == [first.key]
    assert scheduler.awaits_blocks is None


def test_a_request_that_has_ended_waits_for_no_blocks() -> None:
    scheduler = stored().scheduler
    scheduler.submit(request("c", (*STEM, 3), stored_blocks=4))
    assert scheduler.plan().is_empty and scheduler.awaits_blocks == "c" and missing(scheduler)
    scheduler.abort("c")
    assert stored_blocks.waiting(scheduler) is None


def test_loads_leave_the_watermark_and_evict_nothing_that_is_held() -> None:
    loop = Loop(replace(CONFIG, num_blocks=6))
    for name in "ab":
        loop.submit(request(name, (*STEM, 1)))
        loop.drain()
    loop.scheduler.reset_prefix_cache()
    loop.submit(replace(request("long", (9,) * 10), max_tokens=8))
    loop.turn()
    blocks = loop.scheduler.kv.blocks
    assert blocks is not None
    free = blocks.pool.num_free
    waiting = request("c", (*STEM, 5), stored_blocks=4)
    loop.scheduler.submit(waiting)
    keys = [each.key for each in stored_blocks.missing_blocks(loop.scheduler, waiting)]
    assert len(stored_blocks.load(loop.scheduler, "c", keys)) == free - blocks.pool.watermark < 4
    assert blocks.pool.num_free == free


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 1600), marks=pytest.mark.full)])
def test_every_request_gets_what_it_gets_alone(seeds: range) -> None:
    loaded = stores = 0
    for seed in seeds:
        loop = adversary(random.Random(seed))
        loop.drain()
        loaded += loop.loaded
        stores += len(loop.runner.outside)
    assert loaded > 20 and stores > 100, "nothing was loaded or stored"


def loads_nothing(plan: Plan) -> Plan:
    return replace(plan, moves=replace(plan.moves, loads=()))


def loads_the_neighbour(plan: Plan) -> Plan:
    return replace(
        plan,
        moves=replace(
            plan.moves, loads=tuple(replace(each, block=each.block ^ 1) for each in plan.moves.loads)
        ),
    )


@pytest.mark.parametrize("fault", [loads_nothing, loads_the_neighbour])
def test_a_plan_that_loads_wrongly_is_caught(
    fault: Callable[[Plan], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught_in_plans(fault, monkeypatch)


def test_a_store_that_names_another_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockManager._store

    def altered(self: BlockManager, state: RequestState, stores: list[StoredBlock]) -> None:
        store(self, state, stores)
        stores[:] = [replace(each, block=0) for each in stores]

    monkeypatch.setattr(BlockManager, "_store", altered)
    assert_caught()
