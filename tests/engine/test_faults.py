"""What a fault costs: one in a step costs nothing, one that comes again ends the requests in its step and no more."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.device import edit_cache
from tests.support.models import TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.faults import FAULTS_IN_A_ROW
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.equivalence.schedule import run_alone
from xla_engine.errors import EngineClosedError
from xla_engine.graphs.row_state import rows
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_CHOICE, StepResult

SLOTS = TINY_ENGINE.max_num_seqs


@pytest.fixture(scope="module")
def cases(shared_tiny: XlaBatchEngine) -> list[Case]:
    return draw_cases(shared_tiny, 24, seed=31)


@pytest.fixture(scope="module")
def alone(shared_tiny: XlaBatchEngine, cases: list[Case]) -> dict[str, bytes]:
    return {case.request_id: bits(run_alone(shared_tiny, case)) for case in cases}


def bits(completion: Any) -> bytes:
    logprobs = np.asarray(completion.logprobs, np.float32).tobytes()
    return repr((completion.token_ids, completion.finish_reason)).encode() + logprobs


def submit_all(engine: XlaBatchEngine, cases: list[Case]) -> None:
    for case in cases:
        engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)


def ends(outputs: list[RequestOutput]) -> dict[str, RequestOutput]:
    by_id = {output.request_id: output for output in outputs}
    assert len(by_id) == len(outputs) and all(output.finished for output in outputs)
    return by_id


def fail_at(
    monkeypatch: pytest.MonkeyPatch, engine: XlaBatchEngine, verb: str, calls: set[int], error: BaseException
) -> None:
    """Let the runner's n-th calls of a verb raise; a wait that fails has lost its step, a start may have run half."""
    real, count = getattr(engine.runner, verb), 0

    def failing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            if verb == "start":
                real(*arguments)  # the donated state has moved on unnoticed
            raise error
        return real(*arguments)

    monkeypatch.setattr(engine.runner, verb, failing)


@pytest.mark.parametrize("verb", ["start", "wait"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_fault_in_one_step_changes_no_bit_of_any_request(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    lag: int,
) -> None:
    """Early, in the middle, late; an error of memory, of the device, of anything."""
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


def test_a_fault_that_comes_again_ends_no_request_that_was_not_alone_in_its_step(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 5 fail, each with many requests in it: none of them was the cause."""
    tiny.lag = 0
    fail_at(monkeypatch, tiny, "wait", {3, 5}, RuntimeError("planted"))
    submit_all(tiny, cases)
    assert {name: bits(output.outputs[0]) for name, output in ends(tiny.drain()).items()} == alone


def test_a_fault_that_comes_again_with_one_request_alone_ends_it_with_the_tokens_it_had(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.lag = 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tiny.submit([5, 6, 7], params)
    (whole,) = tiny.drain()
    fail_at(monkeypatch, tiny, "wait", {3, 5}, RuntimeError("planted"))
    tiny.submit([5, 6, 7], params)
    (output,) = tiny.drain()
    tokens = output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "error" and "planted" in str(output.error)
    assert 0 < len(tokens) < 12 and tokens == whole.outputs[0].token_ids[: len(tokens)]


def poison(
    monkeypatch: pytest.MonkeyPatch, engine: XlaBatchEngine, fails: Callable[[Any], bool]
) -> list[set[str]]:
    """Let each step fail whose plan `fails`; returns the requests of each step, as they come."""
    real, steps = engine.runner.wait, []

    def wait(step: Any) -> StepResult:
        steps.append({part.request_id for part in (*step.plan.chunks, *step.plan.decode)})
        if fails(step.plan):
            raise RuntimeError("poison")
        return real(step)

    monkeypatch.setattr(engine.runner, "wait", wait)
    return steps


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("culprits", [1, 3])
def test_a_prompt_that_fails_every_time_ends_alone(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    lag: int,
    culprits: int,
) -> None:
    """The requests that share its steps get the bits that they have alone, and each has one end."""
    tiny.lag = lag
    bad = {case.request_id for case in cases[1 : 4 * culprits : 4]}
    poison(monkeypatch, tiny, lambda plan: any(chunk.request_id in bad for chunk in plan.chunks))
    submit_all(tiny, cases)
    outputs = ends(tiny.drain())
    for name in bad:
        assert outputs[name].outputs[0].finish_reason == "error" and "poison" in str(outputs.pop(name).error)
    assert {name: bits(output.outputs[0]) for name, output in outputs.items()} == {
        name: alone[name] for name in alone if name not in bad
    }


def test_a_request_that_fails_in_the_middle_ends_alone_and_keeps_its_tokens(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came while suspects run apart wait, are in no step with them, and end by themselves."""
    tiny.lag = 0
    with monkeypatch.context() as patch:
        decoded = 0

        def fails(plan: Any) -> bool:
            nonlocal decoded
            rows = [row for row in plan.decode if row.request_id == "bad"]
            decoded = 0 if any(chunk.request_id == "bad" for chunk in plan.chunks) else decoded + len(rows)
            return bool(rows) and decoded == 5

        steps = poison(patch, tiny, fails)
        tiny.submit([9, 8, 7], SamplingParams(max_tokens=30, ignore_eos=True), request_id="bad")
        submit_all(tiny, cases[:12])
        outputs = []
        while tiny.stats().recoveries < 2:
            outputs += tiny.step(only_finished=True)
        submit_all(tiny, cases[12:])
        late = {case.request_id for case in cases[12:]}
        outputs += tiny.drain()
    found = ends(outputs)
    bad = found.pop("bad")
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) >= 4
    assert {name: bits(output.outputs[0]) for name, output in found.items()} == alone
    assert {"bad"} in steps and not any("bad" in step and step & late for step in steps)


def test_requests_that_fail_together_and_not_apart_all_end_by_themselves(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when there is memory for fewer rows than there are slots."""
    poison(monkeypatch, tiny, lambda plan: len(plan.decode) > SLOTS // 2)
    submit_all(tiny, cases)
    assert {name: bits(output.outputs[0]) for name, output in ends(tiny.drain()).items()} == alone


@pytest.mark.parametrize("verb", ["start", "wait"])
def test_an_interrupt_anywhere_in_a_turn_loses_nothing(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    """Ctrl-C in a notebook: the cell ends, and the next one goes on to the same bits."""
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


def test_an_interrupt_before_the_device_state_is_replaced_lets_abort_and_submit_work(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny.scheduler, "_admit", interrupted)  # in the middle of the scheduler's own work
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
    with pytest.raises(
        EngineClosedError, match=f"{FAULTS_IN_A_ROW} steps failed in a row, the last with.*gone"
    ):
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


def test_a_repeated_request_that_differs_ends_with_an_error(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1 is checked, not assumed: tokens that were delivered must come again."""
    real, count = tiny.runner.wait, 0

    def wait(step: Any) -> StepResult:
        nonlocal count
        count += 1
        result = real(step)
        if count == 4:
            raise RuntimeError("planted")
        if count == 6:  # the second token of the second run
            wrong = [token if token < 0 else token ^ 1 for token in result.decode.tokens]
            return replace(result, decode=replace(result.decode, tokens=wrong))
        return result

    tiny.lag = 0
    monkeypatch.setattr(tiny.runner, "wait", wait)
    tiny.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    (output,) = tiny.drain()
    assert output.outputs[0].finish_reason == "error" and "run again after a fault" in str(output.error)
    assert len(output.outputs[0].token_ids) >= 3  # what was delivered stays


def test_the_mark_of_a_row_without_choice_is_the_same_on_both_sides() -> None:
    assert rows.NO_CHOICE == NO_CHOICE


@pytest.mark.parametrize("where", ["decode", "prefill"])
@pytest.mark.parametrize("lag", [0, 1])
def test_nan_in_one_row_ends_its_request_and_no_other(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], where: str, lag: int
) -> None:
    """Planted in the row's keys on the device; the slot is clean for the next request."""
    tiny.lag = lag
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    length = 5 if where == "decode" else TINY_ENGINE.chunk_size * (TINY_ENGINE.prefill_lanes[-1] + 2)
    tiny.submit([3] * length, long, request_id="bad")
    tiny.step()
    submit_all(tiny, cases)
    outputs = tiny.step() if where == "decode" else []
    (slot,) = [v.slot.index for v in tiny.snapshot().slots if v.request and v.request.request_id == "bad"]

    def plant(layer: int, name: str, values: np.ndarray) -> np.ndarray:
        if name == "keys" and layer == 0:
            values[slot, :, 0] = np.nan
        return values

    edit_cache(tiny.runner, plant)
    outputs += tiny.drain()
    finished = ends([output for output in outputs if output.finished])
    bad = finished.pop("bad")
    assert bad.outputs[0].finish_reason == "error" and "not numbers" in str(bad.error)
    assert (len(bad.outputs[0].token_ids) > 0) == (where == "decode")
    assert {name: bits(output.outputs[0]) for name, output in finished.items()} == alone


def test_text_that_cannot_be_made_ends_its_own_request_only(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=6)
    embedded.submit("import os", params, request_id="good")
    (good,) = embedded.drain()
    real = tokenizer.incremental

    def panics(skip: bool = True) -> Any:
        detokenizer = real(skip)
        monkeypatch.setattr(detokenizer, "push", _raises(ValueError("the tokenizer panicked")))
        return detokenizer

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "incremental", panics)
        embedded.submit("import os", params, request_id="bad")
    embedded.submit("import os", params, request_id="good")
    outputs = ends(embedded.drain())
    assert outputs["bad"].outputs[0].finish_reason == "error" and "panicked" in str(outputs["bad"].error)
    assert outputs["good"].outputs == good.outputs


def test_an_engine_that_has_requests_and_nothing_to_do_ends_them_instead_of_spinning(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    """A bug of ours must not become a hang."""
    engine = make_engine()
    engine.submit([1], SamplingParams(max_tokens=4), request_id="lost")
    engine.scheduler.abort("lost")  # behind the engine's back
    (output,) = engine.drain()
    assert output.outputs[0].finish_reason == "error" and "nothing to do" in str(output.error)


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


def _raises(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


class HangingDevice:
    """A device whose steps do not come back, from the n-th on, until they are released; and a clock that jumps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: XlaBatchEngine, hangs_from: int) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.release, self.hung = threading.Event(), threading.Event()
        self._left = hangs_from - 1
        self._real = engine.runner.wait
        monkeypatch.setattr(engine.runner, "wait", self.wait)
        monkeypatch.setattr(engine, "clock", lambda: self.now)
        monkeypatch.setattr(engine._waiter, "sleep", self.sleep)

    def wait(self, step: Any) -> StepResult:
        self._left -= 1
        if self._left < 0:
            self.hung.set()
            assert self.release.wait(60)
        return self._real(step)

    def sleep(self, done: threading.Event, seconds: float) -> bool:
        """Wait for a step that comes back; pass the time of one that does not."""
        while not self.hung.is_set():
            if done.wait(0.001):
                return True
        if self.release.is_set():
            return done.wait(60)
        self.slept.append(seconds)
        self.now += seconds
        return False


def test_a_step_that_hangs_ends_every_request_with_its_reason(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(replace(TINY_ENGINE, step_timeout_s=30.0))
    device = HangingDevice(monkeypatch, engine, 3)
    told = []
    reader = OutputCollector(on_news=lambda: told.append(device.now), every_token=False)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for number in range(2 * SLOTS):
        engine.submit([number + 1], params, request_id=str(number))
    engine.submit([5], params, request_id="read", collector=reader)
    outputs = ends(engine.drain())
    assert len(outputs) == 2 * SLOTS and told == [30.0] and device.slept == [30.0]
    for output in (*outputs.values(), *(request.output() for request in reader.take())):
        assert output.outputs[0].finish_reason == "error" and "step_timeout_s" in str(output.error)
    with pytest.raises(EngineClosedError, match="has not answered"):
        engine.submit([1])
    engine.close()  # does not wait for the device
    device.release.set()


def test_deadlines_fire_while_a_step_runs_and_the_heartbeat_grows(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(replace(TINY_ENGINE, step_timeout_s=30.0))
    device = HangingDevice(monkeypatch, engine, 3)
    seen: list[tuple[float, float]] = []

    def news() -> None:
        seen.append((device.now, engine.stats().last_step_age_s))
        device.release.set()

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    soon = OutputCollector(on_news=news, every_token=False)
    engine.submit([1, 2], params, request_id="soon", deadline_s=5, collector=soon)
    engine.submit([1, 3], params, request_id="late")
    (late,) = engine.drain()
    (ended,) = soon.take()
    assert ended.output().outputs[0].finish_reason == "deadline" and seen == [(5.0, 5.0)]
    assert late.outputs[0].finish_reason == "length" and late.error is None
    assert engine.stats().last_step_age_s == 0.0


def test_no_thread_waits_where_a_step_has_no_time_limit(tiny: XlaBatchEngine) -> None:
    tiny.submit([1, 2], SamplingParams(max_tokens=3))
    tiny.drain()
    assert not tiny._waiter._started


def test_a_time_limit_changes_no_identity_and_no_bit(
    make_engine: Callable[..., XlaBatchEngine], tiny: XlaBatchEngine
) -> None:
    assert "step_timeout_s" not in TINY_ENGINE.options()
    limited = make_engine(replace(TINY_ENGINE, step_timeout_s=60.0))
    assert limited.identity().digest() == tiny.identity().digest()
    for engine in (limited, tiny):
        engine.submit([1, 2], SamplingParams(max_tokens=12, logprobs=0), request_id="same")
    assert bits(limited.drain()[0].outputs[0]) == bits(tiny.drain()[0].outputs[0])
