"""A fault in one step changes nothing; one that repeats ends at most the requests in its step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine_faults import SLOTS, _raises, bits, ends, fail_at, submit_all
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.recovery import FAULTS_IN_A_ROW
from xla_engine.equivalence.cases import Case
from xla_engine.errors import EngineClosedError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams


@pytest.mark.parametrize("verb", ["start", "wait"])
@pytest.mark.parametrize("lag", default([1, 0, 2]))
def test_a_fault_in_one_step_changes_no_bit_of_any_request(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    lag: int,
) -> None:
    """The fault comes early, in the middle or late, and is an error of memory, of the device, or any other."""
    tiny.lag = lag
    before, compiles = tiny.stats(), tiny.stats().compiles_after_warmup
    for step in (1, 9, 22):
        with monkeypatch.context() as patch:
            fail_at(patch, tiny, verb, {step}, MemoryError("planted"))
            submit_all(tiny, cases)
            outputs = ends(tiny.drain())
        assert {name: bits(output.outputs[0]) for name, output in outputs.items()} == alone
    assert tiny.stats().recoveries == before.recoveries + 3 and "planted" in str(tiny.last_fault)
    assert tiny.stats().compiles_after_warmup == compiles
    assert sum(tiny.stats().finished.values()) - sum(before.finished.values()) == 3 * len(cases)


def test_what_was_delivered_is_not_delivered_again(
    tiny: XlaBatchEngine, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, tiny, "wait", {12}, RuntimeError("planted"))
    submit_all(tiny, cases)
    seen: dict[str, int] = {}
    generated = tiny.stats().generation_tokens
    for output in tiny.stream():
        count = len(output.outputs[0].token_ids)
        assert count > seen.get(output.request_id, 0) or output.finished
        seen[output.request_id] = count
    assert tiny.stats().generation_tokens - generated == sum(seen.values())


@pytest.mark.parametrize("verb", ["start", "wait"])
def test_an_interrupt_anywhere_in_a_turn_loses_nothing(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    """After Ctrl-C in a notebook the cell ends, and the next one continues with the same bits."""
    fail_at(monkeypatch, tiny, verb, {4, 11, 12}, KeyboardInterrupt())
    submit_all(tiny, cases)
    interrupts, outputs = 0, []
    while tiny.has_unfinished:
        try:
            outputs += tiny.drain()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert {name: bits(output.outputs[0]) for name, output in ends(outputs).items()} == alone


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["deliver", "end"])
def test_a_turn_that_breaks_off_between_commit_and_delivery_loses_no_end(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
) -> None:
    """The scheduler has then ended requests whose callers do not know it yet: they get all their tokens."""
    before, counted, broken = tiny.stats(), tiny.snapshot().counters, 0
    delivery = tiny._loop._delivery
    real = getattr(delivery, where)

    def breaks(*arguments: Any) -> Any:
        nonlocal broken
        if tiny.scheduler.untold and broken < 2:
            broken += 1
            raise error
        return real(*arguments)

    monkeypatch.setattr(delivery, where, breaks)
    submit_all(tiny, cases)
    outputs = []
    while tiny.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            outputs += tiny.drain()
        tiny.scheduler.check()
    assert broken == 2
    assert {name: bits(output.outputs[0]) for name, output in ends(outputs).items()} == alone
    after = tiny.stats().finished
    assert sum(after.values()) - sum(before.finished.values()) == len(cases)
    assert sum(tiny.snapshot().counters.finished.values()) - sum(counted.finished.values()) == len(cases)


def test_an_interrupt_before_the_device_state_is_replaced_lets_abort_and_submit_work(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            tiny.scheduler.waiting, "next_in_line", interrupted
        )  # in the middle of the scheduler's own work
        submit_all(tiny, cases[:5])
        with pytest.raises(KeyboardInterrupt):
            tiny.step()
    assert tiny.abort(cases[0].request_id)
    submit_all(tiny, cases[5:8])
    outputs = ends(tiny.drain())
    assert outputs.pop(cases[0].request_id).outputs[0].finish_reason == "abort"
    assert {name: bits(output.outputs[0]) for name, output in outputs.items()} == {
        case.request_id: alone[case.request_id] for case in cases[1:8]
    }


def test_a_device_that_never_answers_again_is_given_up_with_a_word_to_every_request(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.runner, "wait", _raises(RuntimeError("gone")))
    for number in range(5 * SLOTS):
        engine.submit([number + 1], SamplingParams(max_tokens=4), request_id=str(number))
    outputs = ends(engine.drain())
    assert len(outputs) == 5 * SLOTS
    assert all(o.outputs[0].finish_reason == "error" and "gone" in str(o.error) for o in outputs.values())
    assert engine.stats().recoveries == FAULTS_IN_A_ROW
    with pytest.raises(EngineClosedError, match=f"{FAULTS_IN_A_ROW} steps failed in a row, the last .*gone"):
        engine.submit([1])
    with pytest.raises(EngineClosedError, match="gone"):
        engine.step()


def test_state_that_cannot_be_made_again_closes_the_engine(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.submit([1, 2], SamplingParams(max_tokens=4))
    monkeypatch.setattr(engine.runner, "start", _raises(MemoryError("planted")))
    monkeypatch.setattr(engine.runner, "rebuild", _raises(MemoryError("no room at all")))
    (output,) = engine.drain()
    assert output.outputs[0].finish_reason == "error" and "no room at all" in str(output.error)
    with pytest.raises(EngineClosedError, match="no room at all"):
        engine.submit([1])


def test_an_engine_that_has_requests_and_nothing_to_do_ends_them_instead_of_spinning(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    """A bug in the scheduler must not become a hang."""
    engine = make_engine()
    engine.submit([1], SamplingParams(max_tokens=4), request_id="lost")
    engine.scheduler.abort("lost")  # behind the engine's back
    (output,) = engine.drain()
    assert output.outputs[0].finish_reason == "error" and "plans no work" in str(output.error)


def test_random_faults_among_random_arrivals_and_aborts(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request ends once; those that end by themselves have their own bits."""
    draw = random.Random(5)
    real = {"start": tiny.runner.start, "wait": tiny.runner.wait}

    def flaky(verb: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if draw.random() < 0.02:
                raise draw.choice([RuntimeError, MemoryError, KeyboardInterrupt])("planted")
            return real[verb](*arguments)

        return call

    for verb in real:
        monkeypatch.setattr(tiny.runner, verb, flaky(verb))
    outputs: list[RequestOutput] = []

    def steps(count: int) -> Iterator[None]:
        for _ in range(count):
            try:
                outputs.extend(output for output in tiny.step() if output.finished)
            except KeyboardInterrupt:
                yield

    submitted = 0
    for round_ in range(3):
        for case in draw.sample(cases, len(cases)):
            name = f"{case.request_id}/{round_}"
            tiny.submit(case.prompt_token_ids, _seeded(tiny, case), request_id=name)
            submitted += 1
            list(steps(draw.choice([0, 1, 3])))
            if draw.random() < 0.1:
                tiny.abort(name)
    while tiny.has_unfinished:
        list(steps(1))
    by_id = ends(outputs)
    assert len(by_id) == submitted
    own = [name for name, output in by_id.items() if output.outputs[0].finish_reason in ("stop", "length")]
    assert len(own) > submitted / 3
    for name in own:
        assert bits(by_id[name].outputs[0]) == alone[name.split("/")[0]]


def _seeded(engine: XlaBatchEngine, case: Case) -> SamplingParams:
    """The case's parameters with the noise that its id gives it, so that it may run under another id."""
    return replace(case.params, seed=engine.seed_of(case.request_id, case.params))
