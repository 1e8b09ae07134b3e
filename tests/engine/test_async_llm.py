"""One engine for many tasks: each has its tokens and one end, whatever the others do and however slow it is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.support.models import TINY_ENGINE
from xla_engine import AsyncLLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ChatTemplateError, EngineClosedError, InvalidRequestError
from xla_engine.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[n + 1, 7, n + 3] for n in range(20)]  # more than there are slots


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.fixture
def alone(tiny: XlaBatchEngine) -> list[tuple[int, ...]]:
    results = []
    for prompt in PROMPTS:
        tiny.submit(prompt, PARAMS)
        results.append(tiny.drain()[0].outputs[0].token_ids)
    return results


async def read(
    llm: AsyncLLM,
    prompt: list[int],
    *,
    pause: float = 0.0,
    events: list[RequestOutput] | None = None,
    **options: Any,
) -> RequestOutput:
    """Read a stream to its end, which comes once; tokens only grow."""
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, PARAMS, **options):
        assert last is None or not last.finished
        if last is not None:
            known = last.outputs[0].token_ids
            assert output.outputs[0].token_ids[: len(known)] == known
        last = output
        if events is not None:
            events.append(output)
        await asyncio.sleep(pause)
    assert last is not None and last.finished
    return last


def test_concurrent_tasks_get_their_own_tokens(tiny: XlaBatchEngine, alone: list[tuple[int, ...]]) -> None:
    """Fast and slow readers in one engine; the slow ones get their tokens in fewer, larger pieces."""
    llm = AsyncLLM.from_engine(tiny)
    slow: list[RequestOutput] = []

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(
            *(
                read(llm, prompt, pause=0.05 if n == 3 else 0.0, events=slow if n == 3 else None)
                for n, prompt in enumerate(PROMPTS)
            )
        )

    for _ in range(2):  # also in a second event loop
        outputs = run(main())
        assert [output.outputs[0].token_ids for output in outputs] == alone
    assert len(slow) < 2 * PARAMS.max_tokens
    assert not tiny.has_work and not tiny.has_unfinished


def test_a_reader_that_stalls_holds_up_no_other(tiny: XlaBatchEngine, alone: list[tuple[int, ...]]) -> None:
    llm = AsyncLLM.from_engine(tiny)

    async def main() -> None:
        stalled = llm.generate(PROMPTS[0], PARAMS, request_id="stalled")
        first = await anext(stalled)  # type: ignore[arg-type]
        assert not first.finished
        for number in (1, 2, 3):  # many turns, in which the first is not read
            assert (await read(llm, PROMPTS[number])).outputs[0].token_ids == alone[number]
        rest = [output async for output in stalled]
        assert len(rest) == 1 and rest[0].finished  # everything it missed, in one piece
        assert rest[0].outputs[0].token_ids == alone[0]

    run(main())


@pytest.mark.parametrize("way", ["break", "aclose", "cancel"])
def test_a_reader_that_goes_cancels_its_request(
    tiny: XlaBatchEngine, alone: list[tuple[int, ...]], way: str
) -> None:
    llm = AsyncLLM.from_engine(tiny)

    async def main() -> None:
        neighbour = asyncio.create_task(read(llm, PROMPTS[1]))
        if way == "cancel":
            task = asyncio.create_task(read(llm, PROMPTS[0], request_id="gone"))
            while not tiny.num_running:
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            stream = llm.generate(PROMPTS[0], PARAMS, request_id="gone")
            await anext(stream)  # type: ignore[arg-type]
            if way == "aclose":
                await stream.aclose()  # type: ignore[attr-defined]
            else:
                async for _ in stream:
                    break
                await stream.aclose()  # type: ignore[attr-defined]
        assert not tiny.abort("gone"), "it was aborted already"
        assert (await neighbour).outputs[0].token_ids == alone[1]

    finished = tiny.stats().finished["abort"]
    run(main())
    assert tiny.stats().finished["abort"] == finished + 1 and not tiny.has_work


def test_a_stream_that_is_never_read_submits_nothing(tiny: XlaBatchEngine) -> None:
    async def main() -> None:
        llm = AsyncLLM.from_engine(tiny)
        llm.generate([1], PARAMS)
        await asyncio.sleep(0)
        assert not tiny.has_work

    run(main())


def test_abort_deadline_and_bad_requests(tiny: XlaBatchEngine) -> None:
    llm = AsyncLLM.from_engine(tiny)

    async def main() -> None:
        task = asyncio.create_task(read(llm, [1, 2], request_id="a"))
        while not tiny.num_running:
            await asyncio.sleep(0)
        assert llm.abort("a") and not llm.abort("a")
        assert (await task).outputs[0].finish_reason == "abort"
        assert (await read(llm, [1, 2], deadline_s=1e-6)).outputs[0].finish_reason == "deadline"
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            await read(llm, [])
        with pytest.raises(ChatTemplateError, match="no chat template"):
            async for _ in llm.chat([{"role": "user", "content": "x"}]):
                pass

    run(main())


def test_chat_streams_the_rendered_prompt(embedded: XlaBatchEngine) -> None:
    async def main() -> RequestOutput:
        llm = AsyncLLM.from_engine(embedded)
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = llm.chat(
            [{"role": "user", "content": "x"}], params, chat_template="{{ messages[0].content }} ="
        )
        return [output async for output in outputs][-1]

    output = run(main())
    assert output.prompt == "x =" and output.finished


def test_a_fault_in_a_step_is_survived(
    tiny: XlaBatchEngine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = tiny.runner.wait, 0

    def wait(step: Any) -> Any:
        nonlocal count
        count += 1
        if count == 7:
            raise RuntimeError("planted")
        return real(step)

    monkeypatch.setattr(tiny.runner, "wait", wait)

    async def main() -> list[RequestOutput]:
        llm = AsyncLLM.from_engine(tiny)
        return await asyncio.gather(*(read(llm, prompt) for prompt in PROMPTS))

    assert [output.outputs[0].token_ids for output in run(main())] == alone


def test_a_cancelled_loop_tells_every_reader_and_the_next_request_starts_another(
    tiny: XlaBatchEngine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the third step is waited for, when no request can have ended."""
    llm, real = AsyncLLM.from_engine(tiny), tiny.runner.wait
    reached, told, steps = threading.Event(), threading.Event(), []

    def wait(step: Any) -> Any:
        steps.append(step)
        if len(steps) == 3:
            reached.set()
            assert told.wait(60)
        return real(step)

    monkeypatch.setattr(tiny.runner, "wait", wait)

    async def main() -> None:
        tasks = [asyncio.create_task(read(llm, prompt)) for prompt in PROMPTS]
        while not reached.is_set():
            await asyncio.sleep(0)
        assert llm._driver is not None
        llm._driver.cancel()
        outputs = await asyncio.gather(*tasks)
        told.set()
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
        assert (await read(llm, PROMPTS[5])).outputs[0].token_ids == alone[5]

    run(main())


def test_a_loop_that_fails_tells_every_reader_and_later_requests_fail_at_once(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    llm = AsyncLLM.from_engine(engine)

    def broken(cause: str) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(engine, "_recover", broken)
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


def test_a_drain_lets_readers_finish_and_refuses_new_requests(
    make_engine: Callable[..., XlaBatchEngine], alone: list[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with AsyncLLM.from_engine(make_engine()) as llm:
            tasks = [asyncio.create_task(read(llm, prompt)) for prompt in PROMPTS]
            while not llm.engine.num_running:
                await asyncio.sleep(0)
            draining = asyncio.create_task(llm.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError, match="takes no more"):
                await read(llm, PROMPTS[0])
            await draining
            assert [output.outputs[0].token_ids for output in await asyncio.gather(*tasks)] == alone

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
            assert all("told to end" in str(output.error) for output in outputs)

    run(main())


def test_a_deadline_fires_while_a_step_runs_and_a_step_that_hangs_tells_every_reader(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device does not answer: the deadline comes first, then the time limit of the step."""
    engine = make_engine(replace(TINY_ENGINE, step_timeout_s=20.0))
    now, reached, release = 0.0, threading.Event(), threading.Event()

    def wait(step: Any) -> Any:
        reached.set()
        assert release.wait(60)

    monkeypatch.setattr(engine.runner, "wait", wait)
    monkeypatch.setattr(engine, "clock", lambda: now)
    monkeypatch.setattr(engine, "time_left", lambda began: 0.001 if now < began + 20.0 else 0)

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


@pytest.mark.filterwarnings("ignore")  # the loop is closed with tasks in it, on purpose
def test_a_loop_that_was_closed_with_live_requests_does_not_lock_the_engine(
    make_engine: Callable[..., XlaBatchEngine], alone: list[tuple[int, ...]]
) -> None:
    engine = make_engine()
    llm = AsyncLLM.from_engine(engine)
    loop = asyncio.new_event_loop()

    async def first() -> None:
        await anext(llm.generate(PROMPTS[0], PARAMS, request_id="left"))  # type: ignore[arg-type]

    task = loop.create_task(first())
    while not engine.num_running:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert engine.has_work and not task.done()

    async def main() -> None:
        output = await read(llm, PROMPTS[1], request_id="left")  # the id is free
        assert output.outputs[0].token_ids == alone[1]
        await llm.close()

    run(main())
    assert engine.stats().finished["abort"] == 1


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
