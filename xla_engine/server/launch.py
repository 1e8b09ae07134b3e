"""Run the application under uvicorn, with limits on connections and an orderly shutdown."""

import asyncio
import contextlib
import logging
import signal
import ssl
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from xla_engine.server.app import make_app
from xla_engine.server.protocol import KEEP_ALIVE_S, limited_protocol
from xla_engine.server.service import Service

POLL_S = 0.05
# how long the event loop waits for the interpreter lock while a thread parses or tokenises; Python's default is 5e-3
SWITCH_S = 5e-4
OTHER_FILES = 256  # file descriptors reserved for other uses than connections
log = logging.getLogger("xla_engine.server")


class Server(uvicorn.Server):
    """Shuts down in order: the first SIGTERM or SIGINT lets live requests finish, the second ends the process."""

    def __init__(self, service: Service, *, max_connections: int | None = None, **options: Any) -> None:
        if options.get("ssl_ca_certs"):
            # by default uvicorn also accepts clients without a certificate
            options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
        config = uvicorn.Config(
            make_app(service),
            http=limited_protocol(service.settings, max_connections),
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
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain. Called on a signal, or by a test."""
        self._service.draining = True
        if signal.getsignal(sig) == self.handle_exit:
            for each in HANDLED_SIGNALS:  # so that a second signal ends the process at once
                signal.signal(each, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._service.draining and self._drain is None:
            self._drain = asyncio.create_task(self._end_in_order())
        return await super().on_tick(counter)

    async def _end_in_order(self) -> None:
        service, settings = self._service, self._service.settings
        log.info(
            "draining: finishing %d running sequences; a second signal ends the server at once", service.live
        )
        await asyncio.sleep(settings.drain_grace_s)
        service.refusing = True
        limit = time.monotonic() + settings.drain_timeout_s
        while (service.live or service.batch_jobs) and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        if service.live:
            log.warning("%d sequences did not finish in %g s", service.live, settings.drain_timeout_s)
            service.abort_all()
        self.should_exit = True


def serve(service: Service, *, max_connections: int | None = None, **options: Any) -> None:
    """Serve until a signal. options: uvicorn's `host`, `port`, `uds`, `ssl_certfile`, `ssl_keyfile`, ..."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    if max_connections is not None:
        max_connections = _connections_with_files(max_connections)
    Server(service, max_connections=max_connections, **options).run()


def _connections_with_files(wanted: int) -> int:
    """How many of the wanted connections the limit on open files allows; first raises the soft limit if possible."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    found = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES, 1)
    if found < wanted:
        log.warning("--max-connections is %d, not %d: the system allows no more open files", found, wanted)
    return min(found, wanted)
