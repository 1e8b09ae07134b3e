"""The scheduler's laws by hand: small cases, each naming the bug it would have caught."""

from __future__ import annotations

import doctest
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import xla_engine
from tests.support.fake_runner import decoded_of
from tests.support.scheduler_calls import (
    ERROR,
    LENGTH,
    ask,
    ends,
    make,
    names,
    result,
    step,
)
from xla_engine.scheduler import (
    NO_TOKEN,
    Decoded,
    QueueFullError,
    Request,
    ResultMismatchError,
    Sample,
    Scheduler,
    SchedulerConfig,
    Slot,
    Slots,
    StaleSlotError,
    StepResult,
    policy,
)
from xla_engine.scheduler.pipeline import StepPipeline


def test_row_of_the_last_chunk_decodes_in_the_same_plan_unless_no_other_does() -> None:
    """Alone, its own decode step would delay its first token; with others, it would miss a step."""
    engine = make()
    engine.submit(ask("a", prompt=6, tokens=5))
    plan = engine.plan()
    assert [(chunk.start, chunk.tokens, chunk.is_last) for chunk in plan.chunks] == [
        (0, (0, 1, 2, 3), False),
        (4, (4, 5), True),
    ]
    assert (names(plan.first_rows), plan.decode, plan.joins) == (["a"], (), plan.step + 1)
    engine.submit(ask("b", prompt=6, tokens=5))
    plan = engine.plan()
    assert (names(plan.first_rows), names(plan.decode), plan.joins) == (["b"], ["a", "b"], plan.step)


def test_every_slot_is_used_and_the_lowest_first() -> None:
    """An off-by-one here left one slot idle for years, and a single slot admitted no request."""
    for count in (1, 2, 5):
        engine = make(slots=count)
        for index in range(7):
            engine.submit(ask(f"r{index}"))
        plan = engine.plan()
        assert plan.admitted == tuple(f"r{index}" for index in range(count))
        assert [row.slot.index for row in engine.plan().decode] == list(range(count))


def test_arrival_order_is_admission_order_and_survives_removal() -> None:
    engine = make(slots=1)
    for name in "abcde":
        engine.submit(ask(name, tokens=1))
    engine.abort("c")
    assert names(engine.snapshot().waiting) == list("abde")
    admitted = [name for _ in range(5) for name in engine.plan().admitted]
    assert admitted == list("abde")


def test_prompts_are_served_oldest_first() -> None:
    engine = make(slots=3, chunk=2, budget=6)
    for name, prompt in (("a", 8), ("b", 2), ("c", 2)):
        engine.submit(ask(name, prompt))
    assert names(engine.plan().chunks) == ["a", "a", "a"]
    assert names(engine.plan().chunks) == ["a", "b"]  # each takes 2 for its chunk and 1 for its decode
    assert names(engine.plan().chunks) == ["c"]


def test_duplicate_live_id_is_refused_and_changes_nothing() -> None:
    engine = make(slots=1)
    engine.submit(ask("a"))
    for _ in range(2):  # waiting, then in a slot
        with pytest.raises(ValueError, match="choose another"):
            engine.submit(ask("a"))
        engine.check()
        step(engine)
    assert engine.snapshot().counters.submitted == 1


def test_full_queue_is_an_error_that_changes_nothing() -> None:
    engine = make(slots=1, max_waiting=2)
    for name in "abc":  # one for the free slot, and two that wait
        engine.submit(ask(name))
    for _ in range(2):
        with pytest.raises(QueueFullError, match=r"2 wait and max_waiting is 2; .* raise the bound"):
            engine.submit(ask("d"))
        engine.check()
        assert names(engine.snapshot().waiting)[-2:] == ["b", "c"]
        engine.plan()
    engine.abort("b")
    engine.submit(ask("d"))
    assert names(engine.snapshot().waiting) == ["c", "d"]


def test_requests_that_free_slots_will_take_do_not_count_as_waiting() -> None:
    engine = make(slots=8, max_waiting=2)
    for number in range(10):
        engine.submit(ask(str(number)))
    with pytest.raises(QueueFullError, match="2 wait"):
        engine.submit(ask("one more"))
    engine.plan()
    assert engine.num_waiting == 2


@pytest.mark.parametrize(
    ("left", "budget", "joins", "first", "granted"),
    [
        (3, 12, False, True, 3),
        (3, 13, True, False, 3),
        (3, 12, True, False, 2),  # the joining row's own decode does not fit
        (3, 11, False, False, 2),
        (3, 4, False, False, 1),
        (3, 3, False, False, 0),
        (3, 3, False, True, 1),  # the floor
        (1, 4, True, True, 1),  # the floor, one token beyond
        (1, 4, True, False, 0),
        (1, -9, True, True, 1),
        (1, -9, True, False, 0),
    ],
)
def test_grant(left: int, budget: int, joins: bool, first: bool, granted: int) -> None:
    assert policy.grant(left, budget, 4, joins_decode=joins, first=first) == granted


def test_policy_examples_run() -> None:
    ran = doctest.testmod(policy)
    assert ran.attempted > 0 and ran.failed == 0


def test_cuts_depend_on_the_prompt_alone() -> None:
    def cuts(budget: int, peers: int) -> list[tuple[int, int]]:
        engine = make(slots=8, chunk=4, budget=budget)
        for peer in range(peers):
            engine.submit(ask(f"peer{peer}", prompt=5 + peer, tokens=30))
        engine.submit(ask("a", prompt=18))
        plans = [engine.plan() for _ in range(25)]
        chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.request_id == "a"]
        return [(chunk.start, len(chunk.tokens)) for chunk in chunks]

    assert {tuple(cuts(budget, peers)) for budget in (1, 7, 9, 30, 1000) for peers in (0, 1, 6)} == {
        ((0, 4), (4, 4), (8, 4), (12, 4), (16, 2))
    }


def test_live_rows_decode_and_one_chunk_runs_even_beyond_the_budget() -> None:
    engine = make(slots=4, chunk=4, budget=1)
    for name in "abc":
        engine.submit(ask(name, prompt=4, tokens=40))
    for _ in range(3):
        engine.plan()
    engine.submit(ask("d", prompt=12))
    for _ in range(3):
        plan = engine.plan()
        assert names(plan.decode)[:3] == ["a", "b", "c"]
        assert names(plan.chunks) == ["d"]


@pytest.mark.parametrize("budget", [1, 5, 9, 14])
def test_prompt_is_planned_within_its_own_and_all_older_chunks(budget: int) -> None:
    engine = make(slots=4, chunk=2, budget=budget)
    prompts = {"a": 7, "b": 3, "c": 9, "d": 1}
    for name, prompt in prompts.items():
        engine.submit(ask(name, prompt, tokens=100))
    bound, ended = 0, {}
    for number in range(1, 15):
        ended |= dict.fromkeys(names(engine.plan().first_rows), number)
    for name, prompt in prompts.items():
        bound += policy.num_chunks(prompt, 2)
        assert ended[name] <= bound


def test_first_tokens_come_before_decoded_ones() -> None:
    engine = make()
    engine.submit(ask("a"))
    step(engine)
    engine.submit(ask("b"))
    plan = engine.plan()
    decoded = decoded_of(plan.decode, [Sample(2), Sample(3)])
    sampled = StepResult(first=[Sample(1)], decode=decoded)
    events = [(event.request_id, event.sample.token_id) for event in engine.commit(plan, sampled)]
    assert events == [("b", 1), ("a", 2), ("b", 3)]


def test_steps_are_committed_once_and_in_order() -> None:
    engine = make()
    engine.submit(ask("a"))
    first, second = engine.plan(), engine.plan()
    with pytest.raises(AssertionError, match="step 1 committed in place of 0"):
        engine.commit(second, result(second))
    engine.commit(first, result(first))
    with pytest.raises(AssertionError, match="step 0 committed in place of 1"):
        engine.commit(first, result(first))


def test_empty_plan_takes_no_step_number_and_needs_no_commit() -> None:
    engine = make()
    empty = engine.plan()
    assert empty.is_empty
    assert list(engine.commit(empty, StepResult())) == []
    engine.submit(ask("a"))
    assert engine.plan().step == empty.step == 0


@pytest.mark.parametrize(
    ("first", "decode", "message"),
    [
        ([], [1, 1], "1 first tokens; the result has 0"),
        ([Sample(1)], [], r"decodes slots \[0, 1\]; the result has 0 slots"),
        # a live row without a sample: its request would never end
        ([Sample(1)], [1, NO_TOKEN], "no sample for 'a'"),
    ],
)
def test_result_that_does_not_fit_is_an_error_and_loses_nobody(
    first: list[Sample], decode: list[int], message: str
) -> None:
    engine = make()
    engine.submit(ask("peer"))
    step(engine)
    engine.submit(ask("a"))
    plan = engine.plan()
    with pytest.raises(ResultMismatchError, match=message):
        engine.commit(plan, StepResult(first=first, decode=Decoded(tokens=decode)))
    assert engine.finish("a", ERROR)
    engine.check()


def test_plan_that_travelled_as_bytes_is_credited_the_same() -> None:
    engine = make()
    engine.submit(ask("a", tokens=4))
    plans = [pickle.loads(pickle.dumps(engine.plan())) for _ in range(4)]
    events = [event for plan in plans for event in engine.commit(plan, result(plan))]
    assert len(events) == 4
    assert ends(events) == {"a": LENGTH}


def test_decode_tuple_is_the_same_object_until_membership_changes() -> None:
    engine = make()
    engine.submit(ask("a", tokens=30))
    engine.plan()
    first, second = engine.plan(), engine.plan()
    assert first.decode is second.decode
    engine.submit(ask("b", tokens=3))
    third, fourth, fifth = engine.plan(), engine.plan(), engine.plan()
    assert names(third.decode) == ["a", "b"]
    assert fourth.decode is third.decode
    assert names(fifth.decode) == ["a"]


def test_a_step_has_no_more_chunks_than_a_prefill_call_has_lanes() -> None:
    """If nothing decodes, the token budget alone would allow one more chunk, in a separate call."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, chunk_size=4, max_num_batched_tokens=8 + 2 * 4, max_chunks=2)
    )
    for name, prompt in (("a", 7), ("b", 5), ("c", 3)):
        scheduler.submit(ask(name, prompt=prompt, tokens=1))
    plans = [scheduler.plan() for _ in range(3)]
    assert [[chunk.request_id for chunk in plan.chunks] for plan in plans] == [["a", "a"], ["b", "b"], ["c"]]
    view = scheduler.snapshot()
    assert not view.waiting
    first = next(each for each in plans[0].decisions if each.request_id == "b" and each.action == "hold")
    assert first.reason == "0 of the 2 chunks left; 2 chunks are as many as a prefill call has lanes"
    with pytest.raises(ValueError, match="max_chunks"):
        SchedulerConfig(max_num_seqs=1, chunk_size=4, max_num_batched_tokens=4, max_chunks=0)


def test_slots_come_lowest_first_and_each_release_starts_an_epoch() -> None:
    slots = Slots(3)
    held = [slots.acquire() for _ in range(3)]
    assert held == [Slot(index=index, epoch=0) for index in range(3)]
    assert slots.num_free == 0
    slots.release(held[2])
    slots.release(held[0])
    assert slots.acquire() == Slot(index=0, epoch=1)
    assert slots.acquire() == Slot(index=2, epoch=1)
    slots.check()


def test_stale_slot_cannot_be_released() -> None:
    slots = Slots(1)
    first = slots.acquire()
    slots.release(first)
    with pytest.raises(StaleSlotError, match="slot 0 is not held in epoch 0"):
        slots.release(first)  # while the slot is free
    second = slots.acquire()
    with pytest.raises(StaleSlotError, match="it is in epoch 1"):
        slots.release(first)  # while another occupancy holds it
    assert slots.holds(second) and not slots.holds(first)
    slots.check()


@pytest.mark.parametrize("wrong", [{"prompt_token_ids": ()}, {"max_tokens": 0}, {"max_tokens": -1}])
def test_request_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"request_id": "a", "prompt_token_ids": (1,), "max_tokens": 1}
    with pytest.raises(ValueError, match="'a'"):
        Request(**(fields | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_num_seqs", "chunk_size", "max_num_batched_tokens", "max_waiting"])
def test_limit_below_one_is_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "chunk_size": 1, "max_num_batched_tokens": 1}
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**(limits | {name: 0}))


def test_importing_the_scheduler_needs_the_standard_library_only() -> None:
    root = Path(xla_engine.__file__).parent.parent
    code = (
        "import sys; before = set(sys.modules); import xla_engine.scheduler; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=1800
    )
    assert shown.stdout.split() == ["xla_engine"]


@pytest.mark.parametrize(
    ("constrained", "others", "held", "depth"),
    [
        (0, 0, 0, 1),
        (0, 2, 0, 1),
        (2, 0, 0, 0),
        (2, 2, 0, 0),
        (1, 2, 0, 1),
        (2, 1, 1, 0),
        (2, 2, 1, 1),
        (1, 0, 1, 1),
    ],
)
def test_steps_are_read_at_once_while_most_rows_are_constrained(
    constrained: int, others: int, held: int, depth: int
) -> None:
    """Held rows do not count, so that a slow constraint does not keep others' steps from starting early."""
    engine = make(slots=8)
    pipeline: StepPipeline[object] = StepPipeline(engine, lag=1)
    for at in range(constrained + others):
        engine.submit(replace(ask(str(at), prompt=2, tokens=9), constrained=at < constrained))
    while engine.num_waiting or any(state for state in engine._prefilling):
        step(engine)
    engine.plan(None, {str(at) for at in range(held)})
    assert pipeline.depth == depth
