"""`AsyncLLM`: an engine for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from xla_engine.engine.protocol import SHADOW_S, RequestOptions, check_options, drained, pop_options
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.turn import Turn, Wait, answer_turn
from xla_engine.engine.waiter import device_lost
from xla_engine.errors import EngineClosedError
from xla_engine.llm import LLM
from xla_engine.open_engine import EngineClient
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Params, Prompt, chat_prompt, sampling_params_of
from xla_engine.text.chat_template import CHAT_OPTIONS, Message
from xla_engine.utils.call_thread import CallThread, Pending


class AsyncLLM:
    """`LLM` for asyncio. Arguments are those of `LLM`.

    The engine runs in a task that lives while there is work. Everything happens in the event loop's thread, except
    that a background thread waits for the device. So no locks are needed, and requests may come and go between any two
    steps. A slow reader does not delay others; its next output contains everything it missed.

    Runnable example::

        async with AsyncLLM() as llm:
            async for output in llm.generate("def fib(n):", SamplingParams(max_tokens=48)):
                print(output.outputs[0].text)
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._use(LLM(model, **options).engine)

    @classmethod
    def from_engine(cls, engine: EngineClient) -> AsyncLLM:
        """Wrap an engine that was made by hand; closing the AsyncLLM closes it."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: EngineClient) -> None:
        self.engine = engine
        self._waiter = CallThread()
        self._driver: asyncio.Task[None] | None = None
        self._paused = self._ending = False
        self._under_way: tuple[Turn, Wait, Pending[Any]] | None = None  # the turn while it waits for its step

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Yield cumulative outputs of one request as tokens arrive; only the last one is `finished`.

        The request is submitted when the first output is awaited. Closing the iterator, or cancelling the task that
        reads it, aborts the request. Arguments and errors are those of `XlaBatchEngine.submit`.
        """
        check_options("generate", options)
        outputs = self._read(
            partial(
                self.engine.submit,
                prompt,
                None if sampling_params is None else sampling_params_of(sampling_params),
                request_id=request_id,
                add_special_tokens=add_special_tokens,
                **options,
            )
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def extend(
        self, request_id: str, max_tokens: int, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, but continues a finished request; see `XlaBatchEngine.extend`."""

        def submit(collector: OutputCollector, on_refused: Callable[[Exception], object]) -> str:
            self.engine.extend(request_id, max_tokens, collector=collector, **options)
            return request_id

        outputs = self._read(submit)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def _read(self, submit: Callable[..., str]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of the request that `submit(collector=..., on_refused=...)` queues."""
        self._leave_closed_loop()
        news = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's event loop was closed
                news.set()

        def refuse(error: Exception) -> None:
            refused.append(error)
            tell()

        refused: list[Exception] = []
        collector = OutputCollector(on_news=tell)
        request_id = submit(collector=collector, on_refused=refuse)
        finished = False
        try:
            self.keep_running()
            while not finished:
                await news.wait()
                news.clear()
                if refused:
                    finished = True
                    raise refused[0]
                for request in collector.take():
                    finished = request.finished
                    yield request.output()
        finally:
            # Once the request has ended, another may have its id.
            if not finished and not any(request.finished for request in collector.take()):
                self.engine.abort(request_id)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate` for one conversation; also takes the options of `XlaBatchEngine.render_chat`.

        Without sampling parameters, the answer continues to the end of the model's turn.
        """
        check_options("chat", options, *CHAT_OPTIONS)
        request_options = pop_options(options)
        prompt = await asyncio.to_thread(chat_prompt, self.engine.render_chat, messages, **options)
        outputs = self.generate(
            prompt,
            sampling_params or self.engine.default_params.for_chat(),
            request_id=request_id,
            add_special_tokens=False,
            **request_options,
        )
        async with contextlib.aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def abort(self, request_id: str) -> bool:
        """End a request now; its reader gets a last output. False if it is unknown or has already ended."""
        return self.engine.abort(request_id)

    async def pause(self) -> None:
        """Run no turns until `resume`. Requests keep their state and their results; those submitted meanwhile wait.

        Once this returns, readers get no output. Deadlines still apply.
        """
        self._leave_closed_loop()
        self._paused = True
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])
            await asyncio.sleep(0)  # for readers of the last turn

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        if self.engine.has_work:
            self.keep_running()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._paused

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests and wait until all have ended; abort those left after `timeout_s` seconds.

        New requests raise EngineClosedError from now on. Close the engine afterwards.
        """
        self._leave_closed_loop()
        self._ending = True
        self.engine.stop_taking()
        self.resume()
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver], timeout=timeout_s)
            self.engine.abort_all(drained(timeout_s))
            await asyncio.wait([self._driver])

    async def close(self) -> None:
        """Abort all live requests, whose readers get a last output, and free the device memory."""
        self._leave_closed_loop()
        self._ending = True
        if self._driver is not None and not self._driver.done():
            self.engine.abort_all()
            await asyncio.wait([self._driver])
        self.engine.close()
        self._waiter.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def keep_running(self) -> None:
        """Start the task that runs the engine, unless it is running. Call it after submitting to `engine` directly."""
        loop = asyncio.get_running_loop()
        if self._paused:
            return
        if self._driver is None or self._driver.done():
            self._wake = asyncio.Event()  # set when the device has answered or a request has arrived
            self._driver = loop.create_task(self._drive())
        elif self._driver.get_loop() is not loop:
            raise RuntimeError(
                "this engine belongs to another event loop; use one loop, or one engine per loop"
            )
        else:
            self._wake.set()

    def _leave_closed_loop(self) -> None:
        """If the event loop was closed during a turn, end the turn and abort its requests, which have no reader."""
        driver = self._driver
        if driver is None or driver.done() or not driver.get_loop().is_closed():
            return
        self._driver = None
        if self._under_way is not None:
            (turn, wait, pending), self._under_way = self._under_way, None
            while not pending.done.is_set() and (left := wait.time_left()):
                pending.done.wait(min(left, 1.0))
            answer_turn(turn, pending.result() if pending.done.is_set() else device_lost())
        self.engine.abort_all("the reader's event loop was closed")

    async def _drive(self) -> None:
        try:
            while not self._paused:
                if self.engine.has_work:
                    await self._turn()
                    await asyncio.sleep(0)  # for readers, also when the turn waited for nothing
                elif not self._ending and self.engine.step_shadow():
                    await asyncio.sleep(SHADOW_S)
                else:
                    break
        except EngineClosedError:
            pass  # every reader has been told
        except asyncio.CancelledError:
            self.engine.abort_all()
            raise
        except Exception as error:
            self.engine.fail(f"the engine's loop failed: {type(error).__name__}: {error}")
            raise

    async def _turn(self) -> None:
        turn = self.engine.turn()
        if (wait := next(turn, None)) is None:
            return
        answer: Any
        try:
            answer = await self._answer(turn, wait)
        except asyncio.CancelledError as error:
            answer = error
        self._under_way = None
        answer_turn(turn, answer)

    async def _answer(self, turn: Turn, wait: Wait) -> Any:
        """Wait for the turn's result or exception; meanwhile end requests at their deadlines."""
        wake = self._wake
        wake_up = partial(asyncio.get_running_loop().call_soon_threadsafe, wake.set)
        wake.clear()
        pending = self._waiter.ask(wait.call, wake_up)
        self._under_way = turn, wait, pending
        while not pending.done.is_set():
            if (left := wait.time_left()) == 0:
                return device_lost()
            if left == math.inf:
                await wake.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), left)
                wait.expire()
            wake.clear()
        return pending.result()
