"""Running the application under uvicorn: limits before a request exists, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import time
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xla_engine.server.app import make_app
from xla_engine.server.service import Service

KEEP_ALIVE_S = (
    75  # longer than the 60 s of common proxies, which must not find a connection closed under them
)
POLL_S = 0.05
log = logging.getLogger("xla_engine.server")


class Server(uvicorn.Server):
    """Ends in order: the first SIGTERM or SIGINT lets what is under way finish, the second aborts it."""

    def __init__(self, service: Service, **options: Any) -> None:
        settings = service.settings
        if options.get("ssl_ca_certs"):
            options["ssl_cert_reqs"] = ssl.CERT_REQUIRED  # uvicorn would take clients without one, too
        config = uvicorn.Config(
            make_app(service),
            http=limited_protocol(settings.max_header_bytes, settings.header_timeout_s),
            ws="none",
            lifespan="on",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=10,
            **options,
        )
        super().__init__(config)
        self._service = service
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal, or from a test: begin to drain, and at the second time end at once."""
        self._signals += 1
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Looked at ten times a second."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._end_in_order())
        if self._signals > 1 and not self.should_exit:
            log.warning("aborting what is under way")
            self._service.abort_all()
            self.should_exit = True
        return await super().on_tick(counter)

    async def _end_in_order(self) -> None:
        service, settings = self._service, self._service.settings
        log.info("draining: finishing %d sequences under way; once more to abort them", service.live)
        await asyncio.sleep(settings.drain_grace_s)
        service.refusing = True
        service.stop_batches()
        limit = time.monotonic() + settings.drain_timeout_s
        while (service.live or service.batches_running) and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        if service.live:
            log.warning("%d sequences did not finish in %g s", service.live, settings.drain_timeout_s)
            service.abort_all()
        self.should_exit = True


def limited_protocol(max_header_bytes: int, header_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol with a bound to the size of a request's head and to the time a client takes for it.

    (uvicorn has neither for httptools: CVE-2025-48956 is such a head.)
    """

    class Limited(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            # For a client that takes nothing: closing would wait until it does.
            self.scope["state"]["abort_connection"] = self.transport.abort

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
                if self._timer is None:
                    self._start_timer()
            super().data_received(data)
            if self._in_head and self._head_bytes > max_header_bytes:
                self._refuse("431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._in_head, self._head_bytes = False, 0
            self._stop_timer()
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > max_header_bytes:
                self._refuse("431 Request Header Fields Too Large")
                return
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            if self.cycle is not None:
                super().on_message_complete()

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None:
                super().on_body(body)

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(header_timeout_s, self._head_is_late)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

        def _head_is_late(self) -> None:
            self._timer = None
            if self.transport is not None and not self.transport.is_closing():
                self._refuse("408 Request Timeout")

        def _refuse(self, status: str) -> None:
            with contextlib.suppress(Exception):
                self.transport.write(
                    f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
                )
            self.transport.close()

    return Limited


def serve(service: Service, **options: Any) -> None:
    """Serve until a signal. options: uvicorn's `host`, `port`, `uds`, `ssl_certfile`, `ssl_keyfile`, ..."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Server(service, **options).run()
