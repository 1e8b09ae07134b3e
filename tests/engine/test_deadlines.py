"""Deadlines hold by default, also while a step runs: its request ends in time, and its slot when the step is read.

The device here answers only after the request's end has been delivered, so an end that waits for the step never comes.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.batch_lines import HEADER
from tests.support.engine_faults import SLOTS, bits, ends, submit_all
from xla_engine import LLM, AsyncLLM
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.equivalence.cases import Case
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
SOON = 0.05  # seconds


class BusyDevice:
    """A device whose n-th step does not return before it is released. busy: a thread waits for that step."""

    def __init__(self, engine: XlaBatchEngine, step: int) -> None:
        self.busy, self.release = threading.Event(), threading.Event()
        self.came_back = False
        self._left = step
        self._real = engine.runner.wait
        engine.runner.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, step: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.busy.set()
            assert self.release.wait(600), "the end of the request waits for the step"
            self.came_back = True
        return self._real(step)


@pytest.fixture
def busy(tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], BusyDevice]]:
    monkeypatch.setattr(tiny.runner, "wait", tiny.runner.wait)
    made: list[BusyDevice] = []

    def make(step: int) -> BusyDevice:
        made.append(BusyDevice(tiny, step))
        return made[-1]

    yield make
    for device in made:
        device.release.set()
    tiny.drain()


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_engine_ends_a_request_while_its_step_runs(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice], lag: int
) -> None:
    tiny.lag = lag
    device = busy(3)
    tiny.submit([1, 2], LONG, deadline_s=SOON)
    (output,) = tiny.drain()
    assert reason(output) == "deadline" and not device.came_back
    device.release.set()
    tiny.submit([1, 2], LONG)
    (output,) = tiny.drain()
    assert reason(output) == "length" and device.came_back


@pytest.mark.parametrize("lag", [0, 1])
def test_other_requests_get_their_own_bits(
    tiny: XlaBatchEngine,
    cases: list[Case],
    alone: dict[str, bytes],
    busy: Callable[[int], BusyDevice],
    lag: int,
) -> None:
    """Requests in the same step continue when it is read; later ones find the slot and the id free."""
    tiny.lag = lag
    device = busy(4)
    tiny.submit([1, 2], LONG, request_id="late", deadline_s=SOON)
    submit_all(tiny, cases[: SLOTS + 2])
    outputs: list[RequestOutput] = []
    while "late" not in {output.request_id for output in outputs if output.finished}:
        outputs += tiny.step(only_finished=True)
    assert not device.came_back
    tiny.submit([1, 2], LONG, request_id="late")
    submit_all(tiny, cases[SLOTS + 2 :])
    device.release.set()
    late = [output for output in (*outputs, *tiny.drain()) if output.request_id == "late"]
    assert [reason(output) for output in late] == ["deadline", "length"]
    submit_all(tiny, cases)
    assert {name: bits(output.outputs[0]) for name, output in ends(tiny.drain()).items()} == alone


def test_llm_and_its_streams_return_while_the_step_runs(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    llm = LLM.from_engine(tiny)
    device = busy(3)
    outputs = llm.generate([[1, 2], [3]], LONG, deadline_s=SOON, use_tqdm=False)
    assert [reason(output) for output in outputs] == ["deadline"] * 2 and not device.came_back
    device.release.set()
    device = busy(5)
    *_, last = llm.stream([[1, 2]], LONG, deadline_s=SOON)
    assert reason(last) == "deadline" and not device.came_back


def test_a_thread_that_waits_for_anothers_turn_ends_its_request_in_time(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    """The other thread waits for the device itself, because none of its own requests has a deadline."""
    llm = LLM.from_engine(tiny)
    device = busy(3)
    slow = threading.Thread(target=lambda: llm.generate([[7]], LONG, use_tqdm=False))
    slow.start()
    assert device.busy.wait(600)
    (output,) = llm.generate([[1, 2]], LONG, deadline_s=SOON, use_tqdm=False)
    assert reason(output) == "deadline" and not device.came_back
    device.release.set()
    slow.join()


def test_another_thread_drives_a_turn_that_its_driver_has_left(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    device, first, second = busy(3), OutputCollector(every_token=False), OutputCollector(every_token=False)
    tiny.submit([9], LONG, deadline_s=SOON, collector=first)
    tiny.submit([7], LONG, collector=second)

    def drive() -> None:
        while not second:
            tiny.advance()

    other = threading.Thread(target=drive)
    other.start()
    while not first:
        tiny.advance()
    assert not device.came_back
    device.release.set()  # from here on the other thread drives alone
    other.join(600)
    assert [reason(request.output()) for request in (*first.take(), *second.take())] == ["deadline", "length"]


def test_callbacks_hear_of_a_deadline_while_the_step_runs(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    """The request is submitted while the driving thread waits for the device; no earlier request has a deadline."""
    llm = LLM.from_engine(tiny)
    device, told = busy(3), threading.Event()
    ended: list[str | None] = []

    def hear(output: RequestOutput) -> None:
        if output.finished:
            ended.append(reason(output))
            told.set()

    llm.start()
    try:
        llm.submit([7], LONG, on_output=lambda output: None)
        assert device.busy.wait(600)
        llm.submit([1, 2], LONG, on_output=hear, deadline_s=SOON)
        assert told.wait(600) and ended == ["deadline"] and not device.came_back
    finally:
        device.release.set()
        llm.stop()


def test_a_batch_run_writes_the_line_while_the_step_runs(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    device, sink = busy(3), io.BytesIO()
    lines = b'{"prompt": [1, 2], "max_tokens": 24, "ignore_eos": true, "deadline_s": 0.05}\n'
    run = BatchRun(tiny, read_lines(io.BytesIO(lines), 1000), sink, header=HEADER)
    run.run()
    (line,) = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert line["error"]["code"] == "deadline" and not device.came_back


def leave_a_step(engine: XlaBatchEngine) -> BusyDevice:
    """Leave a step in flight whose only request has ended; it returns soon."""
    device = BusyDevice(engine, 3)
    while not device.busy.is_set():
        engine.submit([1, 2], LONG, deadline_s=SOON)
        assert reason(engine.drain()[0]) == "deadline"
    assert not device.came_back
    threading.Timer(0.1, device.release.set).start()
    return device


def test_asyncio_and_what_needs_an_idle_engine_come_after_a_step_that_was_left(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    """They read the step first, and `close` does not free the memory that it uses."""
    engine = make_engine()
    device = leave_a_step(engine)
    engine.blank()
    assert device.came_back and not engine.has_work

    async def read() -> RequestOutput:
        async for output in AsyncLLM.from_engine(engine).generate([1, 2], LONG):
            last = output
        return last

    device = leave_a_step(engine)
    assert reason(asyncio.run(read())) == "length" and device.came_back
    device = leave_a_step(engine)
    engine.close()
    assert device.came_back


def test_asyncio_ends_a_request_while_its_step_runs(
    tiny: XlaBatchEngine, busy: Callable[[int], BusyDevice]
) -> None:
    device = busy(3)

    async def read() -> RequestOutput:
        async for output in AsyncLLM.from_engine(tiny).generate([1, 2], LONG, deadline_s=SOON):
            last = output
        assert not device.came_back
        device.release.set()
        return last

    output = asyncio.run(read())
    assert reason(output) == "deadline"
