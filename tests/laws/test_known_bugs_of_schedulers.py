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
    """An off-by-one admitted one fewer, and with one slot none."""
    for slots in (1, 2, 3):
        driven = loop(slots)
        for index in range(slots + 2):
            driven.submit(request(f"r{index}", max_tokens=40, prompt=(index, 5, 6)))
        driven.turn()
        assert len(holders(driven)) == slots
        driven.drain()


def test_the_oldest_is_never_the_victim() -> None:
    """The queue was sorted, then reversed: preemption took the oldest, which never finished."""
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
    """The victim was put at the front of the queue, and then the front was taken: it ran without its cache."""
    driven = loop(1)
    driven.submit(request("victim", max_tokens=30))
    driven.turn()
    driven.submit(request("urgent", prompt=(7, 8, 9), priority=-10))
    plan = driven.turn()
    assert plan.admitted == ("urgent",) and holders(driven) == {"urgent"}
    assert {chunk.request_id for chunk in plan.chunks} == {"urgent"}
    driven.drain()


def test_one_refused_request_does_not_affect_the_next() -> None:
    """A flag stuck for the pass: all after an ignored request ran without having been prefilled."""
    driven = loop(2)
    driven.submit(request("a"))
    with pytest.raises(ValueError, match="choose another"):
        driven.scheduler.submit(request("a"))
    driven.submit(request("b", prompt=(9, 9)))
    plan = driven.turn()
    assert {chunk.request_id for chunk in plan.chunks} == {"a", "b"}
    driven.drain()


def test_deferring_a_request_terminates() -> None:
    """A request that could not run now was pushed back to the queue being drained: an endless loop in one pass."""
    driven = loop(2)
    for index in range(6):  # all but one wait for the first
        driven.submit(request(f"r{index}", prompt=(1, 2, 3, 4, 5, 6, 7, 8, index)))
    began = time.monotonic()
    driven.drain()
    assert time.monotonic() - began < 30


def test_nobody_ends_silently() -> None:
    """Ignored sequences were finished without a word: each request ends in exactly one terminal result."""
    driven = loop(1)
    for index in range(5):
        driven.submit(request(f"r{index}", prompt=(index, 1)))
        driven.turn()
        driven.preempt(f"r{index}")
    driven.drain()
    assert len(driven.ended) == 5 and all(life.reason is not None for life in driven.ended)


def test_having_waited_once_gives_no_right_to_preempt() -> None:
    """A counter that was never reset: who once waited preempted others at once, later and for ever."""
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
    """Eviction took the owner away and did not return the block: a leak. Here each request needs every block."""
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
    """Swap-in took from one allocator and freed into the other: parking ended once the host was used up."""
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
    """A step was all prompts or all completions, and a whole prompt at that: requests that generated stood still."""
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
    """Batches of one length: all others lost their place in each step, and were prefilled again, N times N."""
    driven = loop(4, enable_prefix_caching=False)
    for index in range(8):
        driven.submit(request(f"r{index}", prompt=(5,) * (1 + 3 * index), max_tokens=8))
    driven.drain()
    assert driven.preempted.total() == 0
    assert driven.runner.prefilled == sum(1 + 3 * index for index in range(8))


# From here on, bugs of R.


def test_rows_at_different_positions_all_decode_in_every_step() -> None:
    """Only the largest group of rows at one position ran; a lone row starved. `FakeRunner` refuses a row left out."""
    driven = loop(4)
    for index in range(4):
        driven.submit(request(f"r{index}", prompt=tuple(range(1, 2 + 3 * index)), max_tokens=10))
        driven.turn()
    assert len(driven.plans[-1].decode) == 4
    driven.drain()


def test_the_last_prompt_token_is_not_fed_twice() -> None:
    """Prefill's logits were thrown away and the last prompt token decoded again, one position on."""
    driven = loop(1)
    asked = request("a", prompt=(3, 1, 4, 1, 5), max_tokens=4)
    driven.submit(asked)
    driven.drain()
    assert driven.ended[0].samples == expected(asked)[0]
    assert driven.runner.prefilled == 5


def test_chunks_and_slots_stay_together_in_any_order_of_slots() -> None:
    """Rows were sorted after the slots had been listed: keys went to other requests' slots."""
    driven = loop(4)
    for index in range(4):
        driven.submit(request(f"r{index}", prompt=(index, 1, 2), max_tokens=30 - 7 * index))
    driven.turn()
    for index in range(4, 12):  # slots come free from the last to the first
        driven.submit(request(f"r{index}", prompt=(index, 5, 6, 7, 8), max_tokens=2))
    driven.drain()


def test_a_prompt_is_prefilled_once() -> None:
    """`Not prefilled` meant `no output yet`: a request outside the chosen group was prefilled again and again."""
    driven = loop(2, max_num_batched_tokens=4)
    driven.submit(request("a", prompt=tuple(range(1, 11)), max_tokens=2))
    driven.submit(request("b", prompt=tuple(range(11, 1, -1)), max_tokens=2))
    driven.drain()
    assert driven.runner.prefilled == 20


def test_a_request_that_is_removed_in_mid_step_frees_its_slot_once() -> None:
    """Removal freed a slot in the middle of a step, and its tokens went to the next owner."""
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
    """There were none: lists without end, popped at the front, in which every request waited for ever."""
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
