"""Faults planted in an engine's steps, and the results of its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case
from xla_engine.outputs import RequestOutput
from xla_engine.scheduler import StepResult

SLOTS = TINY_ENGINE.max_num_seqs


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


def _raises(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


class HangingDevice:
    """A device whose steps hang from the n-th on until they are released, and a clock that jumps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: XlaBatchEngine, hangs_from: int) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.release, self.hung = threading.Event(), threading.Event()
        self._left = hangs_from - 1
        self._real = engine.runner.wait
        monkeypatch.setattr(engine.runner, "wait", self.wait)
        monkeypatch.setattr(engine, "clock", lambda: self.now)
        monkeypatch.setattr(engine.state.waiter, "sleep", self.sleep)

    def wait(self, step: Any) -> StepResult:
        self._left -= 1
        if self._left < 0:
            self.hung.set()
            assert self.release.wait(600)
        return self._real(step)

    def sleep(self, done: threading.Event, seconds: float) -> bool:
        """Wait for a step that finishes; let time pass for one that hangs."""
        while not self.hung.is_set():
            if done.wait(0.001):
                return True
        if self.release.is_set():
            return done.wait(600)
        self.slept.append(seconds)
        self.now += seconds
        return False
