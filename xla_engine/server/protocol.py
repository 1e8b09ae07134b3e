"""uvicorn's HTTP protocol, with a bound for everything that a client may send and for every wait for it.

(uvicorn has few of them with httptools: CVE-2025-48956 is a head without end.)
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xla_engine.server.settings import ServerSettings

MAX_FIELDS = 100  # headers and trailers of one request
MAX_PIPELINED = 4  # requests of one connection that wait for the answers before them
REST_S = 5.0  # for the rest of a request that was answered before all of it came
# longer than the 60 s of common proxies, which must not find a connection closed under them
KEEP_ALIVE_S = 75
_TOO_LARGE = "431 Request Header Fields Too Large"


class Places:
    """The connections of one server that may make room for new ones, oldest first.

    These are all without a request that a key has let in, so that nobody without a key can keep others out.
    limit: connections that may be open; requests of further ones get status 503.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._without_key: dict[HttpToolsProtocol, None] = {}

    def make_room(self, connections: int) -> None:
        """Abort the oldest if this many, with a new one, are too many."""
        if self.limit is not None and connections > self.limit and self._without_key:
            oldest = next(iter(self._without_key))
            self.remove(oldest)
            # At once: uvloop may read of the new connection before it tells this one of its end.
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def add(self, connection: HttpToolsProtocol) -> None:
        """It has no request now, or none with a key."""
        self._without_key[connection] = None

    def remove(self, connection: HttpToolsProtocol) -> None:
        """It has a request with a key, or is closed."""
        self._without_key.pop(connection, None)


class _RefusedError(Exception):
    """Stops the parser."""


def limited_protocol(settings: ServerSettings, max_connections: int | None) -> type[HttpToolsProtocol]:
    """The protocol's class, whose instances are one server's connections.

    The size of heads, of chunks' lines and of trailers is bounded, their number of fields, and how many requests
    may be pipelined. While nothing of a request is being answered there is always a timer: for a head, for the next
    request, for the rest of one that was answered early, or for a client to take what it was sent before its
    connection is closed. Everything else is the application's: it bounds the wait for bodies and for answers to be
    taken.
    """
    places = Places(max_connections)
    most = settings.max_header_bytes
    seconds = {
        "head": settings.header_timeout_s,
        "next": KEEP_ALIVE_S,
        "rest": REST_S,
        "close": settings.send_timeout_s,
    }

    class Limited(HttpToolsProtocol):
        _in_head = True  # of a request, or before it
        _framing = 0  # bytes received since the last of a body: of heads, chunks' lines and trailers
        _fields = _field_bytes = 0
        _refusal: str | None = None
        _awaited: str | None = None
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            places.make_room(len(self.connections))
            places.add(self)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            places.remove(self)
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._framing += len(data)
            super().data_received(data)
            if self._framing > most and not self.transport.is_closing():
                self._refuse(_TOO_LARGE)
            self._watch()

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= MAX_PIPELINED:
                self._stop("429 Too Many Requests")
            super().on_message_begin()
            self._fields = self._field_bytes = 0
            # For a client that takes nothing: closing would wait until it does.
            self.scope["state"]["abort_connection"] = self.transport.abort
            self.scope["state"]["key_found"] = lambda: places.remove(self)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += 1
            self._field_bytes += len(name) + len(value)
            if self._fields > MAX_FIELDS or self._field_bytes > most:
                self._stop(_TOO_LARGE)
            if self._in_head:  # else it is a trailer, which nobody reads
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if len(self.url) + self._field_bytes > most:
                self._stop(_TOO_LARGE)
            if places.limit is not None and len(self.connections) > places.limit:
                self._stop("503 Service Unavailable")
            self._in_head, self._framing = False, 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._framing = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_head, self._framing = True, 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_answering:
                return
            if self in self.connections:
                places.add(self)
            self._watch()

        def send_400_response(self, msg: str) -> None:
            if self._refusal is None:
                super().send_400_response(msg)
            else:
                self._refuse(self._refusal)

        @property
        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _watch(self) -> None:
            """See that the timer is the one of what this connection waits for."""
            awaited: str | None = "next"
            if self.transport.is_closing():
                awaited = "close"
            elif self._is_answering:
                awaited = None
            elif not self._in_head:
                awaited = "rest"
            elif self._framing or self.cycle is None:
                awaited = "head"
            if awaited == self._awaited:
                return
            self._awaited = awaited
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if awaited is None else self.loop.call_later(seconds[awaited], self._is_late)

        def _is_late(self) -> None:
            if self._awaited == "head":
                self._refuse("408 Request Timeout")
            elif self._awaited == "close":
                self.transport.abort()
            else:
                self.transport.close()
            self._watch()

        def _stop(self, status: str) -> None:
            """Refuse what comes, from within the parser."""
            self._refusal = status
            raise _RefusedError(status)

        def _refuse(self, status: str) -> None:
            if not self._is_answering:  # else it would stand within another answer
                head = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                self.transport.write(head.encode())
            self.transport.close()

    return Limited
