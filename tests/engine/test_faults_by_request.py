"""A fault that repeats ends the request that causes it, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from tests.support.device import edit_cache
from tests.support.engine_faults import SLOTS, bits, ends, fail_at, poison, submit_all
from tests.support.models import BOTH_LANES, TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.recovery import Faults
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.equivalence.cases import Case
from xla_engine.graphs.row_state import rows
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_CHOICE, StepResult


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
    """Requests that arrive while suspects run separately wait, share no step with them, and end normally."""
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
    """For example, memory suffices for fewer rows than there are slots."""
    poison(monkeypatch, tiny, lambda plan: len(plan.decode) > SLOTS // 2)
    submit_all(tiny, cases)
    assert {name: bits(output.outputs[0]) for name, output in ends(tiny.drain()).items()} == alone


def test_an_interrupt_in_the_turn_that_lets_suspects_go_loses_nothing(
    tiny: XlaBatchEngine, cases: list[Case], alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That turn begins with a restart, and the step that it starts afterwards may be interrupted like any other."""
    tiny.lag, has_passed, interrupts = 0, False, 0
    passed, start = Faults.passed, tiny.runner.start

    def noted(self: Faults, *arguments: Any) -> bool:
        nonlocal has_passed
        has_passed = passed(self, *arguments)
        return has_passed

    def interrupted(*arguments: Any) -> Any:
        nonlocal has_passed
        if has_passed:
            has_passed = False
            raise KeyboardInterrupt
        return start(*arguments)

    monkeypatch.setattr(Faults, "passed", noted)
    fail_at(monkeypatch, tiny, "wait", {3, 5}, RuntimeError("planted"))
    monkeypatch.setattr(tiny.runner, "start", interrupted)
    submit_all(tiny, cases)
    outputs = []
    while tiny.has_unfinished:
        try:
            outputs += tiny.drain()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 1
    assert {name: bits(output.outputs[0]) for name, output in ends(outputs).items()} == alone


def test_a_repeated_request_that_differs_ends_with_an_error(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1 is checked, not assumed: a repeated request must sample the delivered tokens again."""
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
    length = 5 if where == "decode" else TINY_ENGINE.chunk_size * (BOTH_LANES.prefill_lanes[-1] + 2)
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
    assert bad.outputs[0].finish_reason == "error" and "not finite" in str(bad.error)
    assert (len(bad.outputs[0].token_ids) > 0) == (where == "decode")
    assert {name: bits(output.outputs[0]) for name, output in finished.items()} == alone


@pytest.mark.parametrize("place", [0, 3, 5])
def test_text_that_cannot_be_made_ends_its_own_request_only(
    place: int, embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its first token has no text, one in the middle, or the last, with which it would end anyway."""
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    embedded.submit("import os", params, request_id="good")
    (good,) = embedded.drain()
    real = tokenizer.incremental

    def panics(skip: bool = True) -> Any:
        detokenizer = real(skip)
        pieces = chain([""] * place, _panic())
        monkeypatch.setattr(detokenizer, "push_all", lambda ids: [next(pieces) for _ in ids])
        monkeypatch.setattr(detokenizer, "push", lambda _: next(pieces))
        return detokenizer

    recoveries = embedded.stats().recoveries
    collector = OutputCollector(every_token=True)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "incremental", panics)
        embedded.submit("import os", params, request_id="bad", collector=collector)
    embedded.submit("import os", params, request_id="good")
    assert ends(embedded.drain())["good"].outputs == good.outputs
    (bad,) = collector.take()
    assert bad.output().outputs[0].finish_reason == "error" and "panicked" in str(bad.output().error)
    assert embedded.stats().recoveries == recoveries


def _panic() -> Iterator[str]:
    raise ValueError("the tokenizer panicked")
    yield
