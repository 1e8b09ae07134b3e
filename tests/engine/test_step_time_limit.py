"""Steps that hang: a time limit ends their requests with the reason, and affects nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine_faults import SLOTS, HangingDevice, bits, ends
from tests.support.models import BOTH_LANES, TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError
from xla_engine.sampling_params import SamplingParams


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


def test_no_thread_waits_where_neither_step_nor_request_has_a_time_limit(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    engine = make_engine()
    engine.submit([1, 2], SamplingParams(max_tokens=3))
    engine.drain()
    assert engine.state.waiter._thread._thread.ident is None
    engine.submit([1, 2], SamplingParams(max_tokens=3), deadline_s=60)
    engine.drain()
    assert engine.state.waiter._thread._thread.ident is not None


def test_a_time_limit_changes_no_identity_and_no_bit(
    make_engine: Callable[..., XlaBatchEngine], tiny: XlaBatchEngine
) -> None:
    assert "step_timeout_s" not in TINY_ENGINE.options()
    limited = make_engine(replace(BOTH_LANES, step_timeout_s=60.0))
    assert limited.identity().digest() == tiny.identity().digest()
    for engine in (limited, tiny):
        engine.submit([1, 2], SamplingParams(max_tokens=12, logprobs=0), request_id="same")
    assert bits(limited.drain()[0].outputs[0]) == bits(tiny.drain()[0].outputs[0])


def test_a_step_that_hangs_before_it_runs_ends_every_request_too(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`start` does not return; a deadline that passes meanwhile does not stop the time limit."""
    engine = make_engine(replace(TINY_ENGINE, step_timeout_s=30.0))
    release, hung, now = threading.Event(), threading.Event(), [0.0]
    real, calls = engine.runner.start, []

    def start(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            hung.set()
            assert release.wait(600)
        return real(*arguments)

    def sleep(done: threading.Event, seconds: float) -> bool:
        while not hung.is_set():
            if done.wait(0.001):
                return True
        now[0] += seconds
        return False

    monkeypatch.setattr(engine.runner, "start", start)
    monkeypatch.setattr(engine, "clock", lambda: now[0])
    monkeypatch.setattr(engine.state.waiter, "sleep", sleep)
    try:
        for number in range(3):
            engine.submit(
                [number + 1], SamplingParams(max_tokens=20, ignore_eos=True), deadline_s=10 + 100 * number
            )
        outputs = engine.drain()
        assert len(outputs) == 3 and now[0] == pytest.approx(30.0, abs=1.0)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert all("step_timeout_s" in str(output.error) for output in outputs)
        engine.close()
    finally:
        release.set()
