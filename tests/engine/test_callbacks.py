"""`LLM.start`, `submit`, `stop`: requests run in the background, and each calls a function of its caller."""

from __future__ import annotations

import logging
import threading

import pytest

from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=250, ignore_eos=True)


class Calls:
    """What a function was called with."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.begun = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.begun.set()

    @property
    def ended(self) -> tuple[tuple[int, ...], str | None]:
        assert [output.finished for output in self.outputs] == [False] * (len(self.outputs) - 1) + [True]
        (one,) = self.outputs[-1].outputs
        return one.token_ids, one.finish_reason


@pytest.fixture
def llm(tiny: XlaBatchEngine) -> LLM:
    return LLM.from_engine(tiny)


def test_each_request_calls_with_its_tokens_and_ends_once(llm: LLM) -> None:
    """Meanwhile this thread calls `generate`, and both get the same tokens."""
    prompts = [[number + 1, 7] for number in range(12)]
    expected = [
        (each.outputs[0].token_ids, "length") for each in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]
    llm.start()
    llm.start()
    calls = [Calls() for _ in prompts]
    for prompt, each in zip(prompts, calls, strict=True):
        llm.submit(prompt, PARAMS, on_output=each)
    last = Calls()
    llm.submit(prompts[0], PARAMS, on_output=last, only_finished=True)
    beside = llm.generate(prompts, PARAMS, use_tqdm=False)
    llm.stop()
    assert [each.ended for each in calls] == expected
    assert [(each.outputs[0].token_ids, "length") for each in beside] == expected
    assert len(last.outputs) == 1
    assert not llm.engine.has_unfinished
    with pytest.raises(EngineClosedError, match="start"):
        llm.submit([1], PARAMS, on_output=last)
    llm.start()
    llm.submit([3], PARAMS, on_output=(again := Calls()))
    llm.stop()
    assert len(again.ended[0]) == 20


def test_a_function_that_fails_ends_its_own_request_only(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    good, called = Calls(), []

    def fails(output: RequestOutput) -> None:
        called.append(output)
        raise KeyError("mine")

    llm.start()
    with caplog.at_level(logging.ERROR, logger="xla_engine"):
        bad = llm.submit([5], ENDLESS, on_output=fails)
        llm.submit([6], PARAMS, on_output=good)
        llm.stop()
    assert len(called) == 1 and good.ended[1] == "length"
    (record,) = caplog.records
    assert repr(bad) in record.getMessage() and "mine" in str(record.exc_info)


def test_functions_may_submit_and_abort(llm: LLM) -> None:
    second = Calls()
    ended: list[str | None] = []

    def first(output: RequestOutput) -> None:
        if output.finished:
            ended.append(output.outputs[0].finish_reason)
            llm.submit([2], PARAMS, on_output=second)
        else:
            llm.engine.abort(output.request_id)

    llm.start()
    llm.submit([1], ENDLESS, on_output=first)
    assert second.begun.wait(600)
    llm.stop()
    assert ended == ["abort"] and second.ended[1] == "length"
    assert len(second.outputs) > 10  # nobody else ran turns, so that each has told its tokens


def test_a_stop_without_time_aborts_what_runs(llm: LLM) -> None:
    calls = Calls()
    llm.start()
    with pytest.raises(InvalidRequestError):
        llm.submit([], PARAMS, on_output=calls)
    llm.submit([1, 2], ENDLESS, on_output=calls)
    assert calls.begun.wait(600)
    llm.stop(timeout_s=0)
    assert calls.ended[1] == "abort" and llm.engine.num_running == 0
    assert llm.engine.drain() == []


def test_an_engine_that_fails_ends_every_request(
    llm: LLM, tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [Calls() for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "advance", lambda: 1 / 0)
        llm.start()
        for each in calls:
            try:
                llm.submit([1], PARAMS, on_output=each)
            except EngineClosedError:
                calls.remove(each)
        llm.stop()
    tiny.state.closed = None
    assert calls and {each.ended[1] for each in calls} == {"error"}
    assert all("ZeroDivisionError" in str(each.outputs[-1].error) for each in calls)
    assert llm.generate([[1]], PARAMS, use_tqdm=False)[0].outputs[0].finish_reason == "length"
