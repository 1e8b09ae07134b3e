"""What the scheduler reports: decisions, snapshots, and the invariants that it checks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.scheduler_calls import ask, make, names, step
from xla_engine.scheduler import RequestView, Scheduler, Slot, Status


def test_decisions_say_why() -> None:
    engine = make(slots=1, chunk=2, budget=5)
    engine.submit(ask("a", prompt=6, tokens=3))
    engine.submit(ask("b"))
    engine.submit(ask("c"))
    told = [
        [(said.request_id, said.action, said.reason) for said in engine.plan().decisions] for _ in range(4)
    ]
    waits = ("b", "wait", "no free slot: 1 of 1 busy")
    assert told == [
        [
            ("a", "admit", "slot 0 was free"),
            waits,
            (
                "a",
                "prefill",
                "2 of the 3 chunks left; token budget 5 used up by 0 decode rows and 2 chunks of 2",
            ),
        ],
        [waits, ("a", "prefill", "1 of the 1 chunks left; within the token budget 5")],
        [waits],
        [waits, ("a", "hand over", "all 3 new tokens are planned; slot 0 is free")],
    ]


def test_hold_and_floor_decisions_name_the_budget() -> None:
    engine = make(slots=3, chunk=2, budget=2)
    for name in "abc":
        engine.submit(ask(name, prompt=2, tokens=9))
    decisions = {said.request_id: said for said in engine.plan().decisions}
    assert (
        decisions["a"].reason
        == "1 of the 1 chunks left; one runs in every step, here beyond the token budget 2"
    )
    assert decisions["b"].action == "hold"
    assert decisions["b"].reason.startswith(
        "0 of the 1 chunks left; token budget 2 used up by 0 decode rows and 1"
    )
    third = engine.snapshot().slots[2].request
    assert third is not None and third.decision is not None
    assert third.decision.reason == "the prompt of 'b' is older and goes first"


def test_decisions_do_not_grow_with_the_queue() -> None:
    engine = make(slots=2)
    for index in range(5000):
        engine.submit(ask(f"r{index}"))
    engine.plan()
    assert names(engine.plan().decisions) == ["r2"]
    last = engine.snapshot().waiting[-1].decision
    assert last is not None and last.reason == "4997 go first"


def test_snapshot_tells_slots_queue_and_counters() -> None:
    engine = make(slots=3, chunk=4, budget=9)
    engine.submit(ask("a", prompt=3, tokens=9))
    step(engine)
    engine.submit(ask("b", prompt=15))
    engine.plan()
    engine.submit(ask("c"))
    view = engine.snapshot()
    a, b, free = view.slots
    assert a.request is not None and b.request is not None and free.request is None
    assert (a.slot, a.position) == (Slot(index=0, epoch=0), 3 + 1)  # the second token is sampled, not written
    assert (a.request.status, a.request.planned, a.request.credited) == (Status.RUNNING, 2, 1)
    assert (b.slot.index, b.position, b.request.status, b.request.prefilled) == (1, 8, Status.PREFILLING, 8)
    assert (free.slot, free.position) == (Slot(index=2, epoch=0), 0)
    assert reasons(view.waiting) == ["gets slot 2 in the next plan"]
    first, second, third = reasons(slot.request for slot in view.slots)
    assert first == "decodes; 8 tokens left" and "of the 4 chunks left" in second and third == ""
    assert (view.counters.steps_planned, view.counters.steps_committed) == (2, 1)
    assert (engine.num_waiting, engine.num_running, engine.has_unfinished) == (1, 2, True)


def reasons(views: Iterable[RequestView | None]) -> list[str]:
    return ["" if view is None or view.decision is None else view.decision.reason for view in views]


def test_a_snapshot_says_what_holds_now() -> None:
    """After slots were freed, and while rows run, whatever the last plan decided."""
    engine = make(slots=2)
    for name in "abcde":
        engine.submit(ask(name, tokens=9 if name == "c" else 3))
    assert reasons(engine.snapshot().waiting) == [
        "gets slot 0 in the next plan",
        "gets a slot in the next plan",
        *("2 go first", "3 go first", "4 go first"),
    ]
    step(engine)
    view = engine.snapshot()
    assert reasons(slot.request for slot in view.slots) == ["decodes; 2 tokens left"] * 2
    assert reasons(view.waiting) == ["no free slot: 2 of 2 busy", "1 goes first", "2 go first"]
    engine.abort("b")
    view = engine.snapshot()
    assert view.slots[1].request is None
    assert reasons(view.waiting) == ["gets slot 1 in the next plan", "1 goes first", "2 go first"]
    assert "gets slot 1 in the next plan" in view._repr_html_()
    engine.plan()
    assert [slot.request and slot.request.request_id for slot in engine.snapshot().slots] == ["a", "c"]
    engine.plan()
    view = engine.snapshot()
    assert reasons(view.draining) == ["all its tokens are planned; 2 tokens not read yet"]
    assert reasons(view.waiting)[0] == "gets slot 0 in the next plan"


def test_check_finds_a_broken_invariant() -> None:
    def leak_slot(engine: Scheduler) -> None:
        engine.kv.slots.acquire()

    def lose_request(engine: Scheduler) -> None:
        del engine.states["a"]

    def share_slot(engine: Scheduler) -> None:
        engine.states["b"].occupancy = engine.states["a"].occupancy

    def skip_prompt(engine: Scheduler) -> None:
        engine.states["a"].prefilled -= 1

    def overcredit(engine: Scheduler) -> None:
        engine.states["a"].credited = 4

    def forget_row(engine: Scheduler) -> None:
        engine.running.decoding.leave(engine.states["a"])

    for damage in (leak_slot, lose_request, share_slot, skip_prompt, overcredit, forget_row):
        engine = make(slots=3)
        engine.submit(ask("a", tokens=9))
        engine.submit(ask("b", tokens=9))
        engine.plan()
        engine.check()
        damage(engine)
        with pytest.raises(AssertionError):
            engine.check()
