"""The scheduler broken on purpose, to show that its laws can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.faults import credit_goes_to_the_slot
from tests.support.storms import storm
from xla_engine.scheduler import (
    Chunk,
    Events,
    Plan,
    Scheduler,
    Slot,
    Slots,
    StepResult,
    WaitingQueue,
    pipeline,
    policy,
)
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps import commit as crediting
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.decode import Decoding


def epochs_never_move(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Slots.release

    def stuck(self: Slots, slot: Slot, use: int = 0) -> None:
        release(self, slot, use)
        self._epochs[slot.index] -= 1

    monkeypatch.setattr(Slots, "release", stuck)


def credit_ignores_the_occupancy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: a token goes to the request that has the id now."""
    commit = Scheduler.commit

    def careless(self: Scheduler, plan: Plan, result: StepResult) -> Events:
        def today(part):  # type: ignore[no-untyped-def]
            state = self.states.get(part.request_id)
            change = part._replace if isinstance(part, Chunk) else partial(replace, part)
            return change(slot=state.occupancy) if state and state.occupancy else part

        plan = replace(plan, chunks=tuple(map(today, plan.chunks)), decode=tuple(map(today, plan.decode)))
        return commit(self, plan, result)

    monkeypatch.setattr(Scheduler, "commit", careless)


def busy_slot_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "acquire", lambda self, index=None: self.current(0))


def slot_is_handed_over_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    due = Decoding.due
    monkeypatch.setattr(Decoding, "due", lambda self, step: due(self, step + 1) + due(self, step))


def cap_is_one_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Decoding.join

    def late(self: Decoding, state: RequestState, step: int, *, sampled: int) -> None:
        join(self, state, step + 1, sampled=sampled)

    monkeypatch.setattr(Decoding, "join", late)


def queue_is_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: WaitingQueue) -> RequestState:
        return max(self, key=lambda state: state.arrival)

    monkeypatch.setattr(WaitingQueue, "head", property(last))


def priority_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: requests do not age, so a low priority may starve."""
    monkeypatch.setattr(policy, "place", lambda arrival, priority, aging: (priority, arrival))


def priority_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "place", lambda arrival, priority, aging: (arrival, arrival))


def missing_choice_is_taken_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crediting, "NO_CHOICE", -99)


def tokens_are_kept_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: a request continues after a restart although its state on the device is gone."""
    restarted = pipeline.restarted

    def careless(old: Scheduler, *given: Any) -> Scheduler:
        fresh = restarted(old, *given)
        for request_id, state in old.states.items():
            fresh.states[request_id].credited = state.credited
        return fresh

    monkeypatch.setattr(pipeline, "restarted", careless)


def one_slot_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "num_free", property(lambda self: max(len(self._free) - 1, 0)))


def budget_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "grant", lambda chunks_left, *_, **__: chunks_left)


def floor_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = policy.grant
    monkeypatch.setattr(policy, "grant", lambda *args, **kwargs: grant(*args, **(kwargs | {"first": False})))


def cut_depends_on_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(start: int, tokens: int, size: int, count: int, _: object) -> list[tuple[int, int]]:
        return [(start, min(start + size + 1, tokens))][:count]

    monkeypatch.setattr(policy, "next_cuts", cut)


def stop_tokens_are_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: the fast path for plain decode steps is taken although a stop token may end a row."""
    joined = Committer.joined

    def careless(self: Committer, state: RequestState) -> None:
        joined(self, state)
        self._stops.clear()

    monkeypatch.setattr(Committer, "joined", careless)


def samples_of_the_dead_are_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "ended", lambda *_: None)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    epochs_never_move,
    credit_ignores_the_occupancy,
    credit_goes_to_the_slot,
    busy_slot_is_given_away,
    slot_is_handed_over_a_step_early,
    cap_is_one_too_high,
    queue_is_a_stack,
    priority_is_strict,
    priority_is_ignored,
    missing_choice_is_taken_for_a_token,
    tokens_are_kept_over_a_restart,
    one_slot_is_never_used,
    budget_is_ignored,
    floor_is_forgotten,
    cut_depends_on_the_load,
    stop_tokens_are_overlooked,
    samples_of_the_dead_are_credited,
]


def storms() -> None:
    for seed in range(30):
        loop = storm(random.Random(seed))
        submitted = [life.request for life in (*loop.ended, *loop.live.values())]
        loop.drain(lag=1)
        assert len(submitted) == len(loop.ended)


def test_storms_pass_without_a_fault() -> None:
    storms()


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # A token for a request that is not there is a LookupError.
    with pytest.raises((AssertionError, ValueError, LookupError)):
        storms()
