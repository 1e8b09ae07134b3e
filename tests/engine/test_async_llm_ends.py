"""A loop that fails, is closed or runs out of time tells every reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.async_reading import PROMPTS, read, run
from tests.support.models import TINY_ENGINE
from xla_engine import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.state import EngineState
from xla_engine.errors import EngineClosedError


def test_a_loop_that_fails_tells_every_reader_and_later_requests_fail_at_once(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    llm = AsyncLLM.from_engine(engine)

    def broken(error: Exception) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(engine._recovery, "after", broken)
    monkeypatch.setattr(engine.runner, "start", lambda *_: 1 / 0)

    async def main() -> None:
        outputs = await asyncio.gather(*(read(llm, prompt) for prompt in PROMPTS))
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert all("a bug" in str(output.error) for output in outputs)
        with pytest.raises(EngineClosedError, match="a bug"):
            await read(llm, PROMPTS[0])
        assert llm._driver is not None
        with pytest.raises(ValueError, match="a bug"):
            await llm._driver
        await llm.close()

    run(main())


def test_close_while_tasks_read_gives_each_its_end(make_engine: Callable[..., XlaBatchEngine]) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(make_engine()) as llm:
            tasks = [asyncio.create_task(read(llm, prompt)) for prompt in PROMPTS]
            while not llm.engine.num_running:
                await asyncio.sleep(0)
        outputs = await asyncio.gather(*tasks)
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
        with pytest.raises(EngineClosedError, match=r"close\(\) was called"):
            await read(llm, PROMPTS[0])

    run(main())


def test_a_drain_without_time_aborts_what_runs_and_says_why(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(make_engine()) as llm:
            tasks = [asyncio.create_task(read(llm, prompt)) for prompt in PROMPTS]
            while not llm.engine.num_running:
                await asyncio.sleep(0)
            await llm.drain(timeout_s=0)
            outputs = await asyncio.gather(*tasks)
            assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
            assert all("was drained" in str(output.error) for output in outputs)

    run(main())


def test_a_deadline_fires_while_a_step_runs_and_a_step_that_hangs_tells_every_reader(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device does not answer: the deadline comes first, then the time limit of the step."""
    engine = make_engine(replace(TINY_ENGINE, step_timeout_s=20.0))
    now, reached, release = 0.0, threading.Event(), threading.Event()

    def wait(step: Any) -> Any:
        reached.set()
        assert release.wait(600)

    monkeypatch.setattr(engine.runner, "wait", wait)
    monkeypatch.setattr(engine, "clock", lambda: now)
    monkeypatch.setattr(EngineState, "time_left", lambda _, began: 0.001 if now < began + 20.0 else 0)

    async def main() -> None:
        nonlocal now
        llm = AsyncLLM.from_engine(engine)
        soon = asyncio.create_task(read(llm, [1, 2], deadline_s=5))
        others = [asyncio.create_task(read(llm, prompt)) for prompt in PROMPTS]
        while not reached.is_set():
            await asyncio.sleep(0)
        now = 6.0
        output = await soon
        assert output.outputs[0].finish_reason == "deadline" and engine.stats().last_step_age_s == 6.0
        now = 21.0
        outputs = await asyncio.gather(*others)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert all("step_timeout_s" in str(output.error) for output in outputs)
        await llm.close()  # does not wait for the device

    try:
        run(main())
    finally:
        release.set()


@pytest.mark.filterwarnings("ignore")
def test_close_does_not_hang_after_the_loop_was_closed(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine()
    llm = AsyncLLM.from_engine(engine)
    loop = asyncio.new_event_loop()
    task = loop.create_task(read(llm, PROMPTS[0]))
    while not engine.num_running:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    run(llm.close())
    assert not task.done() and engine.stats().finished["abort"] == 1
