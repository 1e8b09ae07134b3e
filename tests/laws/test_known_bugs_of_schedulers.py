"""Bugs that schedulers with paging and prefix caches have shipped, each with a test that would have caught it.

From the issue trackers and code of two such schedulers: one of blocks with preemption by recompute (P), one of fixed
slots with a radix tree of prefixes (R). What only a model shows is in `test_known_bugs_of_engines`; that two threads
may not drive one engine, in `test_lifecycle`.
"""

from __future__ import annotations

import time

import pytest

from tests.support.fake_runner import expected
from tests.support.small_loops import LAYOUTS, holders, loop, request
from xla_engine.scheduler import FinishReason, QueueFullError

# From here on, bugs of P.


def test_admits_exactly_max_num_seqs_also_when_that_is_one() -> None:
    """The bug: an off-by-one error admitted one request too few, and none with a single slot."""
    for slots in (1, 2, 3):
        driven = loop(slots)
        for index in range(slots + 2):
            driven.submit(request(f"r{index}", max_tokens=40, prompt=(index, 5, 6)))
        driven.turn()
        assert len(holders(driven)) == slots
        driven.drain()


def test_the_oldest_is_never_the_victim() -> None:
    """The bug: the queue was sorted, then reversed, so preemption took the oldest request, which never finished."""
    driven = loop(2)
    driven.submit(request("oldest", max_tokens=60, prompt=(3, 4)))
    driven.submit(request("second", max_tokens=60, prompt=(5, 4)))
    driven.turn()
    for index in range(12):  # the urgent come on and on; `Loop` requires that the first of all keeps its slot
        driven.submit(request(f"urgent{index}", prompt=(6, index), max_tokens=3, priority=-2))
        driven.turn()
    assert driven.preempted.total() > 0
    driven.drain()


def test_the_preempted_request_does_not_run_in_place_of_the_one_it_made_room_for() -> None:
    """The bug: the victim was put at the front of the queue, and then the front was taken, so it ran without
    its cache."""
    driven = loop(1)
    driven.submit(request("victim", max_tokens=30))
    driven.turn()
    driven.submit(request("urgent", prompt=(7, 8, 9), priority=-10))
    plan = driven.turn()
    assert plan.admitted == ("urgent",) and holders(driven) == {"urgent"}
    assert {chunk.request_id for chunk in plan.chunks} == {"urgent"}
    driven.drain()


def test_one_refused_request_does_not_affect_the_next() -> None:
    """The bug: a flag was never reset within a pass, so all requests after a refused one ran without prefill."""
    driven = loop(2)
    driven.submit(request("a"))
    with pytest.raises(ValueError, match="choose another"):
        driven.scheduler.submit(request("a"))
    driven.submit(request("b", prompt=(9, 9)))
    plan = driven.turn()
    assert {chunk.request_id for chunk in plan.chunks} == {"a", "b"}
    driven.drain()


def test_deferring_a_request_terminates() -> None:
    """The bug: a request that could not run was pushed back to the queue being drained, which made an endless loop."""
    driven = loop(2)
    for index in range(6):  # all but one wait for the first
        driven.submit(request(f"r{index}", prompt=(1, 2, 3, 4, 5, 6, 7, 8, index)))
    began = time.thread_time()
    driven.drain()
    assert time.thread_time() - began < 30


def test_nobody_ends_silently() -> None:
    """The bug: refused sequences ended without any result. Here each request ends in exactly one final result."""
    driven = loop(1)
    for index in range(5):
        driven.submit(request(f"r{index}", prompt=(index, 1)))
        driven.turn()
        driven.preempt(f"r{index}")
    driven.drain()
    assert len(driven.ended) == 5 and all(life.reason is not None for life in driven.ended)


def test_having_waited_once_gives_no_right_to_preempt() -> None:
    """The bug: a counter was never reset, so a request that had waited once could preempt others at once ever
    after."""
    driven = loop(1)
    driven.submit(request("first", max_tokens=9))
    driven.submit(request("waited", prompt=(4, 4), max_tokens=9))
    while driven.live:
        driven.turn()
        if driven.live:
            driven.submit(request(f"r{len(driven.ended)}{driven.arrivals}", prompt=(driven.arrivals % 9, 2)))
        if driven.arrivals > 20:
            break
    driven.drain()
    assert driven.preempted.total() == 0, "equal priorities never preempt each other"


@pytest.mark.parametrize("num_blocks", LAYOUTS)
def test_terminating_all_reaches_those_who_wait_and_those_who_are_parked(num_blocks: int | None) -> None:
    driven = loop(2, num_blocks=num_blocks)
    for index in range(5):
        driven.submit(request(f"r{index}", prompt=(index, 3), max_tokens=20))
    driven.turn()
    driven.turn()
    assert driven.preempt("r0", how="park") == "park"
    driven.turn()
    for name in list(driven.live):
        assert driven.finish(name, FinishReason.ABORT)
    driven.check()
    assert len(driven.ended) == 5 and not driven.runner.host


def test_pages_of_those_who_lose_them_come_back_to_the_pool() -> None:
    """The bug: eviction removed the owner without returning the block, a leak. Here each request needs every block."""
    driven = loop(2, enable_prefix_caching=False, num_blocks=6, swap_tokens=0)
    for index in range(12):
        driven.submit(request(f"r{index}", prompt=(1,) * 12 + (index,), max_tokens=12))
    for turn in range(24):
        driven.turn()
        for name in holders(driven):
            if turn % 3:
                driven.preempt(name, to_back=True)
            else:
                driven.finish(name)
    driven.drain()
    assert len(driven.ended) == 12 and driven.preempted.total() > 6


def test_room_on_the_host_is_given_back_by_those_who_return() -> None:
    """The bug: swap-in took from one allocator and freed into the other, so swapping ended when the host's
    was used up."""
    driven = loop(1, swap_tokens=12)
    driven.submit(request("long", prompt=(2, 3), max_tokens=40))
    for index in range(3):
        driven.turn()
        driven.submit(request(f"urgent{index}", prompt=(6, index), max_tokens=2, priority=-10))
        while f"urgent{index}" in driven.live:
            driven.turn()
    assert driven.preempted == {"park": 3}
    driven.drain()


def test_prompts_do_not_always_win() -> None:
    """The bug: a step was all prefill (of whole prompts) or all decode, so decoding requests stalled during
    prefill."""
    driven = loop(2, max_num_batched_tokens=5)
    driven.submit(request("live", max_tokens=14, prompt=(3, 1)))
    driven.turn()
    driven.submit(request("long", prompt=tuple(range(1, 13)) * 3, max_tokens=1))
    while "long" in driven.live:
        plan = driven.turn()
        assert [row.request_id for row in plan.decode] == ["live"]
        assert sum(len(chunk.tokens) for chunk in plan.chunks) == 4
    driven.drain()


def test_rows_of_other_lengths_are_not_preempted_in_every_step() -> None:
    """The bug: a batch held one length only; all other requests were preempted in each step and prefilled again."""
    driven = loop(4, enable_prefix_caching=False)
    for index in range(8):
        driven.submit(request(f"r{index}", prompt=(5,) * (1 + 3 * index), max_tokens=8))
    driven.drain()
    assert driven.preempted.total() == 0
    assert driven.runner.prefilled == sum(1 + 3 * index for index in range(8))


# From here on, bugs of R.


def test_rows_at_different_positions_all_decode_in_every_step() -> None:
    """The bug: only the largest group of rows at one position ran, and a lone row starved. `FakeRunner`
    refuses a plan without all rows."""
    driven = loop(4)
    for index in range(4):
        driven.submit(request(f"r{index}", prompt=tuple(range(1, 2 + 3 * index)), max_tokens=10))
        driven.turn()
    assert len(driven.plans[-1].decode) == 4
    driven.drain()


def test_the_last_prompt_token_is_not_fed_twice() -> None:
    """The bug: prefill's logits were discarded, and the last prompt token was decoded again at the next position."""
    driven = loop(1)
    asked = request("a", prompt=(3, 1, 4, 1, 5), max_tokens=4)
    driven.submit(asked)
    driven.drain()
    assert driven.ended[0].samples == expected(asked)[0]
    assert driven.runner.prefilled == 5


def test_chunks_and_slots_stay_together_in_any_order_of_slots() -> None:
    """The bug: rows were sorted after their slots had been listed, so keys were written to other requests' slots."""
    driven = loop(4)
    for index in range(4):
        driven.submit(request(f"r{index}", prompt=(index, 1, 2), max_tokens=30 - 7 * index))
    driven.turn()
    for index in range(4, 12):  # slots come free from the last to the first
        driven.submit(request(f"r{index}", prompt=(index, 5, 6, 7, 8), max_tokens=2))
    driven.drain()


def test_a_prompt_is_prefilled_once() -> None:
    """The bug: a request without output counted as not prefilled, so one outside the chosen group was
    prefilled repeatedly."""
    driven = loop(2, max_num_batched_tokens=4)
    driven.submit(request("a", prompt=tuple(range(1, 11)), max_tokens=2))
    driven.submit(request("b", prompt=tuple(range(11, 1, -1)), max_tokens=2))
    driven.drain()
    assert driven.runner.prefilled == 20


def test_a_request_that_is_removed_in_mid_step_frees_its_slot_once() -> None:
    """The bug: removal freed a slot in the middle of a step, and its tokens went to the slot's next owner."""
    driven = loop(1)
    driven.submit(request("a", max_tokens=20))
    driven.turn(lag=3)
    driven.turn(lag=3)
    driven.finish("a")
    driven.submit(request("b", prompt=(8, 8), max_tokens=4))
    for _ in range(4):
        driven.turn(lag=3)
    driven.drain()


def test_a_queue_has_a_bound_a_timeout_and_priorities() -> None:
    """The bug: there were none. Queues were unbounded lists in which a request could wait forever."""
    driven = loop(1, max_waiting=2)
    driven.submit(request("live", max_tokens=12))
    driven.turn()
    driven.submit(request("patient", prompt=(4, 5), priority=1))
    driven.submit(request("impatient", prompt=(4, 6), queue_deadline=3.0))
    with pytest.raises(QueueFullError):
        driven.submit(request("beyond", prompt=(4, 7)))
    driven.pass_time(3.0)
    assert [life.reason for life in driven.ended] == [FinishReason.QUEUE_TIMEOUT]
    driven.submit(request("sooner", prompt=(4, 8)))
    driven.drain()
    assert [life.request.request_id for life in driven.ended] == ["impatient", "live", "sooner", "patient"]
