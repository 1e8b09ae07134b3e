"""How requests end: stop, length, abort, and what the end frees and drops."""

from __future__ import annotations

import pytest

from tests.support.fake_runner import decoded_of
from tests.support.scheduler_calls import END, LENGTH, STOP, ask, ends, make, names, result, step
from xla_engine.scheduler import FinishReason, Plan, Sample, Slot, Status, StepResult, TokenEvent


@pytest.mark.parametrize(
    ("sampled", "max_tokens", "credited", "reason"),
    [
        ([7, 7, 7], 3, 3, LENGTH),
        ([7, END], 3, 2, STOP),
        ([END], 3, 1, STOP),  # the first token, from the prefill program
        ([END], 1, 1, STOP),  # stop and cap on the only token
        ([7], 1, 1, LENGTH),
        ([7, END], 2, 2, STOP),  # stop and cap on one decoded token
        ([7, 7], 2, 2, LENGTH),
    ],
)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_stop_wins_over_length_and_both_are_credited(
    sampled: list[int], max_tokens: int, credited: int, reason: FinishReason, lag: int
) -> None:
    engine = make()
    engine.submit(ask("a", tokens=max_tokens))
    tokens = iter(sampled)
    flight: list[Plan] = []
    events: list[TokenEvent] = []
    while engine.has_unfinished:
        plan = engine.plan()
        flight += [] if plan.is_empty else [plan]
        while len(flight) > (0 if plan.is_empty else lag):
            oldest = flight.pop(0)
            first = [Sample(next(tokens)) for _ in oldest.first_rows]
            stopped = any(sample.token_id == END for sample in first)
            rows = [None if stopped else next(map(Sample, tokens), None) for _ in oldest.decode]
            decoded = decoded_of(oldest.decode, rows)
            events += engine.commit(oldest, StepResult(first=first, decode=decoded))
            engine.check()
    assert [event.sample.token_id for event in events] == sampled[:credited]
    assert [event.finish_reason for event in events] == [None] * (credited - 1) + [reason]


def test_cap_of_one_uses_no_decode_row_and_frees_its_slot_in_the_same_plan() -> None:
    engine = make(slots=1)
    engine.submit(ask("a", tokens=1))
    engine.submit(ask("b", tokens=1))
    first, second = engine.plan(), engine.plan()  # nothing was committed between
    assert (names(first.chunks), first.decode) == (["a"], ())
    assert (names(second.chunks), second.decode) == (["b"], ())
    assert first.chunks[0].slot == Slot(index=0, epoch=0)
    assert second.chunks[0].slot == Slot(index=0, epoch=1)
    assert ends(engine.commit(first, result(first))) == {"a": LENGTH}
    assert ends(engine.commit(second, result(second))) == {"b": LENGTH}


def test_stop_at_the_first_token_drops_the_decode_of_the_same_plan() -> None:
    engine = make()
    engine.submit(ask("peer"))
    step(engine)
    engine.submit(ask("a"))
    plan = engine.plan()
    sampled = StepResult(first=[Sample(END)], decode=decoded_of(plan.decode, [Sample(7), Sample(7)]))
    events = [TokenEvent("a", Sample(END), STOP), TokenEvent("peer", Sample(7), None)]
    assert list(engine.commit(plan, sampled)) == events
    assert not engine.abort("a")
    assert engine.snapshot().counters.tokens_dropped == 1


def test_tokens_sampled_after_a_stop_are_dropped_at_any_lag() -> None:
    engine = make()
    engine.submit(ask("a", tokens=10))
    plans = [engine.plan() for _ in range(4)]
    assert ends(engine.commit(plans[0], result(plans[0], END))) == {"a": STOP}
    assert [list(engine.commit(plan, result(plan))) for plan in plans[1:]] == [[], [], []]


def test_slot_is_handed_over_when_the_last_token_is_planned() -> None:
    engine = make(slots=1)
    engine.submit(ask("a", tokens=2))
    engine.submit(ask("b", tokens=9))
    plans = [engine.plan() for _ in range(4)]
    assert (names(plans[1].decode), names(plans[2].chunks)) == (["a"], ["b"])
    assert names(engine.snapshot().draining) == ["a"]
    events = [event for plan in plans for event in engine.commit(plan, result(plan))]
    assert names(events) == ["a", "a", "b", "b"]
    assert ends(events) == {"a": LENGTH}


@pytest.mark.parametrize("max_tokens", range(1, 6))
def test_never_more_tokens_planned_than_asked_for(max_tokens: int) -> None:
    engine = make()
    engine.submit(ask("a", tokens=max_tokens))
    plans = [engine.plan() for _ in range(8)]
    assert sum(len(plan.first_rows) + len(plan.decode) for plan in plans) == max_tokens
    assert [plan.is_empty for plan in plans] == [False] * max_tokens + [True] * (8 - max_tokens)


def test_finish_frees_the_slot_for_the_next_plan() -> None:
    engine = make(slots=1)
    engine.submit(ask("a", tokens=50))
    engine.submit(ask("b"))
    plan = engine.plan()
    engine.commit(plan, result(plan))
    assert engine.finish("a", STOP)  # a stop string
    assert engine.plan().admitted == ("b",)
    assert engine.snapshot().counters.finished == dict.fromkeys(FinishReason, 0) | {STOP: 1}


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "draining"])
def test_abort_ends_a_request_in_every_state(state: str) -> None:
    engine = make(slots=1, chunk=2, budget=2)
    if state == "waiting":
        engine.submit(ask("peer", prompt=2, tokens=3))
    prompt, tokens = {"prefilling": (8, 5), "running": (2, 5)}.get(state, (2, 1))
    engine.submit(ask("a", prompt, tokens))
    plan = engine.plan()
    view = engine.snapshot()
    there = {
        "waiting": view.waiting,
        "draining": view.draining,
        "prefilling": [slot.request for slot in view.slots if slot.request],
        "running": [slot.request for slot in view.slots if slot.request],
    }[state]
    assert [(seen.request_id, seen.status) for seen in there] == [
        ("a", Status.RUNNING if state == "draining" else Status(state))
    ]
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.check()
    assert not [event for event in engine.commit(plan, result(plan)) if event.request_id == "a"]
    assert engine.has_unfinished == (state == "waiting")
    engine.submit(ask("next"))
    assert engine.plan().admitted == (("next",) if state != "waiting" else ())


def test_abort_of_an_unknown_or_finished_request_is_false() -> None:
    engine = make()
    assert not engine.abort("nobody")
    engine.submit(ask("a", tokens=1))
    step(engine)
    assert not engine.abort("a")


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_resubmitted_id_never_gets_the_tokens_of_its_former_life(lag: int) -> None:
    """If tokens were credited by id and slot index alone, the new request would get the old one's token."""
    engine = make(slots=1)
    engine.submit(ask("a", tokens=20))
    old = [engine.plan() for _ in range(lag)]
    assert engine.abort("a")
    engine.submit(ask("a", tokens=20))
    new = engine.plan()
    assert new.chunks[0].slot.index == old[0].chunks[0].slot.index
    assert [list(engine.commit(plan, result(plan, 1))) for plan in old] == [[]] * lag
    assert [event.sample.token_id for event in engine.commit(new, result(new, 2))] == [2]


def test_id_resubmitted_while_it_waits_gets_nothing_from_steps_in_flight() -> None:
    engine = make(slots=1)
    engine.submit(ask("a", tokens=20))
    old = engine.plan()
    engine.abort("a")
    engine.submit(ask("b", tokens=20))
    engine.submit(ask("a", tokens=20))
    engine.plan()
    assert list(engine.commit(old, result(old))) == []
