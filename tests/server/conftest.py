"""One server on the embedded model for all tests, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.bodies import BODIES, TEMPLATE, offline
from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.server import protocol
from xla_engine.server.batches.worker import Batches
from xla_engine.server.launch import Server
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings

ENGINE = EngineConfig(max_num_seqs=8, max_model_len=512)


class Running:
    """A server in a thread: its service, its address, and its event loop."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.service = service
        self.server = Server(service, host="127.0.0.1", port=0, log_config=None, **options)
        self._thread = threading.Thread(target=self._serve, name="server")
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(main(), loop_factory=self.server.config.get_loop_factory())  # as `serve` does: uvloop

    @property
    def batches(self) -> Batches:
        """Those behind the server's routes."""
        routes = self.server.config.loaded_app.app.routes
        handler = next(each.endpoint for each in routes if getattr(each, "path", "") == "/v1/batches")
        found: Batches = handler.__self__._batches
        return found

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(600)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "it did not happen"
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.handle_exit(15, None)
        self._thread.join(600)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def engine() -> XlaBatchEngine:
    """The engine of the session's server, which closes it."""
    return XlaBatchEngine.from_pretrained(None, ENGINE)


@pytest.fixture(scope="session")
def expected(engine: XlaBatchEngine) -> list[dict[str, Any]]:
    """The results of a batch run for BODIES, before the server starts."""
    return offline(engine, BODIES)


@pytest.fixture(scope="session")
def running(
    engine: XlaBatchEngine, expected: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("batches")
    settings = ServerSettings(
        model_names=("embedded", "alias"),
        sampling_defaults={"chat_template": TEMPLATE},
        max_waiting=80,  # 64 clients ask for as many sequences, slots included
        max_body_bytes=1 << 20,
        header_timeout_s=6.0,
        body_timeout_s=6.0,
        send_timeout_s=6.0,
        batch_dir=folder,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(protocol, "REST_S", 0.5)  # a test waits for it
        server = Running(Service(AsyncLLM.from_engine(engine), settings))
    yield server
    server.stop()


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    """The session's server, without a live request before and after."""
    running.wait_until(lambda: running.service.live == 0)
    yield running
    running.wait_until(lambda: running.service.live == 0 and not running.service.engine.has_work)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=1800) as client:
        yield client
