"""The server's engine, as used by a batch run in its own thread."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, Unpack

from xla_engine.engine.protocol import SubmitOptions
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError, XlaEngineError
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PRIORITIES
from xla_engine.server.service import Service
from xla_engine.utils.plain import integer_of

BATCH_PRIORITY = PRIORITIES[-1]  # below every interactive request, except for priority_aging
POLL_S = 0.2
T = TypeVar("T")


class BatchExpiredError(XlaEngineError, code="batch_expired"):
    """The batch expired before this line ran."""


class EngineView:
    """The engine interface that `BatchRun` needs. Prepares requests in the caller's thread, queues them in the loop's.

    A request without a seed gets the same noise as its line in `xla-engine run`, whatever else runs.

    name: prefix of the batch's request ids. Every key sees it in `/v1/requests`, so it is not the batch's id.
    salt: separates the batch's cached prefixes from other tenants'.
    expires_at: Unix seconds after which no line is started.
    """

    def __init__(
        self, service: Service, loop: asyncio.AbstractEventLoop, name: str, *, salt: str, expires_at: float
    ) -> None:
        self.halted = threading.Event()  # set: stop at once; live requests get no result
        self.expired = False
        self._service = service
        self._engine = engine = service.engine
        self.max_num_seqs, self.adapter_named = engine.max_num_seqs, service.adapter_named
        self.render_chat, self.read_pictures = engine.render_chat, engine.read_pictures
        self._loop = loop
        self._name = name
        self._salt = salt
        self._expires_at = expires_at
        self._collector = OutputCollector(on_news=self._on_news, every_token=False)
        self._ended: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._open: set[str] = set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> str:
        """As `XlaBatchEngine.submit`, but compiles constraints here and ignores `on_refused` and `collector`.

        Also raises BatchExpiredError, and KeyboardInterrupt if the view is halted.
        """
        if time.time() >= self._expires_at:
            self.expired = True
            raise BatchExpiredError("the batch's completion_window was over before this line ran")
        request_id = options.get("request_id")
        assert request_id is not None
        params = params or self._engine.default_params
        self._service.compile(params)
        if params.seed is None:
            params = replace(params, seed=self._engine.seed_of(request_id, params))
        if self._salt and isinstance(salt := options.get("cache_salt", ""), str):
            options["cache_salt"] = f"{self._salt}/{salt}"
        if integer_of(options.get("priority", 0)) in PRIORITIES:
            options["priority"] = BATCH_PRIORITY
        options |= {
            "request_id": self._inner(request_id),
            "collector": self._collector,
            "on_refused": None,
        }

        def queue_it() -> None:
            self._engine.submit(prompt, params, **options)
            self._service.llm.keep_running()

        try:
            self._in_loop(queue_it)
        except EngineClosedError:
            raise KeyboardInterrupt from None  # its lines stay unfinished for the next server
        self._open.add(request_id)
        return request_id

    def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
        """Wait until a request of this batch ends. Raises KeyboardInterrupt if the view is halted."""
        while not self.halted.is_set():
            try:
                ended = [self._ended.get(timeout=POLL_S)]
            except queue.Empty:
                continue
            while not self._ended.empty():
                ended.append(self._ended.get())
            outputs = [
                replace(each, request_id=each.request_id.removeprefix(self._inner(""))) for each in ended
            ]
            self._open.difference_update(output.request_id for output in outputs)
            if self._engine.closed_because is not None:
                break  # the requests ended with the engine
            return outputs
        raise KeyboardInterrupt

    def abort(self, request_id: str) -> bool:
        self._open.discard(request_id)
        return self._in_loop(lambda: self._engine.abort(self._inner(request_id)), patient=True)

    def _on_news(self) -> None:
        self._loop.call_soon(self._collect)  # not now: the engine is in the middle of a turn

    def _collect(self) -> None:
        for request in self._collector.take():
            if request.finished:
                self._ended.put(request.output())

    def _inner(self, request_id: str) -> str:
        return f"{self._name}/{request_id}"

    def _in_loop(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """Run a function in the engine's thread and wait for it. Unless patient, stop waiting when halted."""

        async def do() -> T:
            return work()

        future = asyncio.run_coroutine_threadsafe(do(), self._loop)
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():  # raised by the function itself
                    raise
                if self.halted.is_set() and not patient:
                    future.cancel()
                    raise KeyboardInterrupt from None
