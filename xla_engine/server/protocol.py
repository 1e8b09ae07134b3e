"""uvicorn's HTTP protocol with limits on everything that a client can send, and on every wait for a client.

(With httptools uvicorn has few limits: CVE-2025-48956 is an endless request head.)
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xla_engine.server.request_parser import RequestParser, refusal
from xla_engine.server.settings import ServerSettings

MAX_FIELDS = 100  # headers and trailers of one request
MAX_PIPELINED = 4  # requests of one connection waiting for earlier answers
REST_S = 5.0  # time for the rest of a request that was answered before it was complete
# longer than the 60 s of common proxies, so that the proxy closes the connection first
KEEP_ALIVE_S = 75
_TOO_LARGE = "431 Request Header Fields Too Large"


class Places:
    """The connections of one server that may be closed to make room for new ones, oldest first.

    These are the connections without an authenticated request, so that clients without a key cannot keep others out.
    limit: open connections; requests on further ones get status 503.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._without_key: dict[HttpToolsProtocol, None] = {}

    def make_room(self, connections: int) -> None:
        """Abort the oldest connection if `connections`, including a new one, exceeds the limit."""
        if self.limit is not None and connections > self.limit and self._without_key:
            oldest = next(iter(self._without_key))
            self.remove(oldest)
            # Discard it now: uvloop may read from the new connection before it calls this one's connection_lost.
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def add(self, connection: HttpToolsProtocol) -> None:
        """Add a connection that has no authenticated request."""
        self._without_key[connection] = None

    def remove(self, connection: HttpToolsProtocol) -> None:
        """Remove a connection that has an authenticated request, or is closed."""
        self._without_key.pop(connection, None)


class _RefusedError(Exception):
    """Stops the parser."""


def limited_protocol(settings: ServerSettings, max_connections: int | None) -> type[HttpToolsProtocol]:
    """A protocol class for the connections of one server.

    It limits the size of heads, chunk lines and trailers, the number of fields, and the number of pipelined
    requests. Whenever no request is being answered, a timer runs: for a head, for the next request, for the rest of
    a request that was answered early, or for the client to read the last answer before its connection is closed.
    The application limits the remaining waits, for bodies and for clients to read answers.
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
        _framing = 0  # bytes of heads, chunk lines and trailers received since the last byte of a body
        _fields = _field_bytes = 0
        _refusal: str | None = None
        _awaited: str | None = None
        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.parser = RequestParser(self)  # type: ignore[assignment]  # it has what uvicorn uses

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
            # For a client that does not read: close() would wait for it.
            self.scope["state"]["abort_connection"] = self.transport.abort
            self.scope["state"]["key_found"] = lambda: places.remove(self)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += 1
            self._field_bytes += len(name) + len(value)
            if self._fields > MAX_FIELDS or self._field_bytes > most:
                self._stop(_TOO_LARGE)
            if self._in_head:  # else it is a trailer, which is ignored
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if len(self.url) + self._field_bytes > most:
                self._stop(_TOO_LARGE)
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if (status := refusal(method, version, self.headers)) is not None:
                self._stop(status)
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
            """Set the timer for whatever this connection now waits for."""
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
            """Reject the input, from within the parser."""
            self._refusal = status
            raise _RefusedError(status)

        def _refuse(self, status: str) -> None:
            if not self._is_answering:  # else it would be inside another answer
                head = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                self.transport.write(head.encode())
            self.transport.close()

    return Limited
