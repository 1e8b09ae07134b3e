"""Of any number of requests, any number make their steps fail; only these end with an error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_faults import bits, ends, poison, submit_all
from tests.support.failing_device import Culprit, FailingEngine, token
from tests.support.profiles import examples
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.recovery import FAULTS_IN_A_ROW
from xla_engine.equivalence.cases import Case
from xla_engine.errors import EngineClosedError
from xla_engine.observability.observer import Observer

culprits = st.builds(Culprit, token=st.just(0) | st.integers(1, 4), verb=st.sampled_from(["start", "wait"]))
Wanted = tuple[Culprit | None, int, int]  # what it does, tokens of its prompt, tokens to sample


@st.composite
def any_requests(draw: st.DrawFn) -> list[Wanted]:
    """Requests in any order, of which none, some or all make their steps fail."""
    bad, good = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    kinds = draw(st.permutations([*draw(st.lists(culprits, min_size=bad, max_size=bad)), *[None] * good]))
    return [(kind, draw(st.integers(1, 14)), draw(st.integers(1, 6))) for kind in kinds]


@settings(max_examples=examples(40, 300), deadline=None, derandomize=True, database=None)
@given(slots=st.integers(1, 16), lag=st.integers(0, 2), wanted=any_requests())
def test_any_culprits_among_any_requests_end_alone(slots: int, lag: int, wanted: list[Wanted]) -> None:
    """None, some or all of them fail, in any order, at the prompt or later, in `start` or in `wait`."""
    named = {f"{number}": one for number, one in enumerate(wanted)}
    engine = FailingEngine(slots, {name: one[0] for name, one in named.items() if one[0]}, lag=lag)
    for name, (_, prompt, tokens) in named.items():
        engine.submit(name, prompt=prompt, tokens=tokens)
    outputs = engine.drain()
    assert engine.state.closed is None
    assert outputs.keys() == named.keys()
    for name, (culprit, _, tokens) in named.items():
        (found,) = outputs[name].outputs
        assert found.token_ids == tuple(token(name, number) for number in range(len(found.token_ids)))
        if culprit is not None and culprit.token < tokens:
            assert found.finish_reason == "error" and f"poison of {name}" in str(outputs[name].error)
        else:
            assert found.finish_reason == "length" and len(found.token_ids) == tokens


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(slots=st.integers(1, 16), lag=st.integers(0, 2), requests=st.integers(1, 40), good=st.integers(0, 9))
def test_a_device_that_fails_every_step_is_given_up_in_time(
    slots: int, lag: int, requests: int, good: int
) -> None:
    """The device fails after any number of good turns, and no request is blamed."""
    engine = FailingEngine(slots, {}, lag=lag)
    for number in range(requests):
        engine.submit(str(number), prompt=5, tokens=40)
    for _ in range(good):
        engine.advance()
    engine.device.dead = True
    outputs = engine.drain()
    assert engine.device.failed == FAULTS_IN_A_ROW
    closed = f"{FAULTS_IN_A_ROW} steps failed in a row, the last one without any request: RuntimeError: gone"
    assert engine.state.closed == closed
    assert len(outputs) == requests and {output.error for output in outputs.values()} == {closed}
    with pytest.raises(EngineClosedError, match="without any request"):
        engine.advance()


@pytest.mark.parametrize("slots", [8, 16])
@pytest.mark.parametrize("bad", [8, 9, 17])
def test_the_search_costs_few_steps(slots: int, bad: int) -> None:
    """Failing prompts are first in the queue; each costs at most two steps more than a binary search of the slots."""
    names = [str(number) for number in range(17)]
    engine = FailingEngine(slots, {name: Culprit() for name in names[:bad]})
    for name in names:
        engine.submit(name, tokens=3)
    reasons = {name: output.outputs[0].finish_reason for name, output in engine.drain().items()}
    assert reasons == {name: "error" if name in names[:bad] else "length" for name in names}
    assert engine.device.failed <= bad * (2 + math.log2(slots))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_request_is_not_blamed_for_one_that_was_taken_back(lag: int) -> None:
    """A caller who submits a failing request, and aborts it while the step runs, ends no other request."""
    engine = FailingEngine(4, {f"bad{number}": Culprit() for number in range(30)}, lag=lag)
    engine.submit("good", tokens=200)
    for number in range(30):
        engine.submit(f"bad{number}")
        engine.advance()
        assert engine.intake.abort(f"bad{number}")
        for _ in range(lag + 1):
            engine.advance()
    assert engine.device.failed > 2
    outputs = engine.drain()
    assert outputs["good"].outputs[0].finish_reason == "length"
    assert engine.state.closed is None


def test_a_fault_outside_of_any_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host fails in every turn, so no request has to wait for a search through all requests."""
    engine = FailingEngine(2, {})
    for number in range(100):
        engine.submit(str(number))

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    engine.state.observers.add(Observer(started=broken))
    engine.drain()
    assert "outside of a step" in str(engine.state.closed) and "planted" in str(engine.state.closed)


def test_prompts_that_fail_first_in_line_end_no_other(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real engine, with half of all requests failing."""
    bad = {case.request_id for case in cases[: len(cases) // 2]}
    poison(monkeypatch, tiny, lambda plan: any(chunk.request_id in bad for chunk in plan.chunks))
    submit_all(tiny, cases)
    outputs = ends(tiny.drain())
    assert {name for name, output in outputs.items() if output.error is not None} == bad
    assert {name: bits(outputs[name].outputs[0]) for name in alone if name not in bad} == {
        name: alone[name] for name in alone if name not in bad
    }
