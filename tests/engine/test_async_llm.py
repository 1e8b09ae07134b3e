"""One engine for many tasks: each gets its tokens and one end, whatever the others do and however slowly it reads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.async_reading import PARAMS, PROMPTS, read, run
from xla_engine import AsyncLLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ChatTemplateError, EngineClosedError, InvalidRequestError
from xla_engine.outputs import RequestOutput


@pytest.fixture
def alone(tiny: XlaBatchEngine) -> list[tuple[int, ...]]:
    results = []
    for prompt in PROMPTS:
        tiny.submit(prompt, PARAMS)
        results.append(tiny.drain()[0].outputs[0].token_ids)
    return results


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
    """The loop is cancelled while it waits for the third step, when no request can have ended."""
    llm, real = AsyncLLM.from_engine(tiny), tiny.runner.wait
    reached, told, steps = threading.Event(), threading.Event(), []

    def wait(step: Any) -> Any:
        steps.append(step)
        if len(steps) == 3:
            reached.set()
            assert told.wait(600)
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
            with pytest.raises(EngineClosedError, match="accepts no more"):
                await read(llm, PROMPTS[0])
            await draining
            assert [output.outputs[0].token_ids for output in await asyncio.gather(*tasks)] == alone

    run(main())


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


def test_a_pause_changes_nothing_but_the_time(tiny: XlaBatchEngine, alone: list[tuple[int, ...]]) -> None:
    """No output arrives during a pause; earlier and new requests then continue with their own tokens."""
    llm = AsyncLLM.from_engine(tiny)

    async def main() -> None:
        seen: list[RequestOutput] = []
        early = [asyncio.create_task(read(llm, PROMPTS[n], events=seen)) for n in range(3)]
        while len(seen) < 6:
            await asyncio.sleep(0)
        await llm.pause()
        before, steps = len(seen), tiny.stats().steps
        late = asyncio.create_task(read(llm, PROMPTS[3]))
        gone = asyncio.create_task(read(llm, PROMPTS[4], request_id="gone"))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert llm.is_paused and (len(seen), tiny.stats().steps) == (before, steps)
        assert llm.abort("gone") and (await gone).outputs[0].finish_reason == "abort"
        llm.resume()
        assert [(await task).outputs[0].token_ids for task in (*early, late)] == alone[:4]

    run(main())


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_paused_engine_can_be_ended(make_engine: Callable[..., XlaBatchEngine], end: str) -> None:
    llm = AsyncLLM.from_engine(make_engine())

    async def main() -> str | None:
        await llm.pause()
        task = asyncio.create_task(read(llm, PROMPTS[0]))
        await asyncio.sleep(0)
        await (llm.drain() if end == "drain" else llm.close())
        return (await task).outputs[0].finish_reason

    assert run(main()) == {"drain": "length", "close": "abort"}[end]
