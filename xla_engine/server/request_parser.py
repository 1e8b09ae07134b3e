"""An HTTP/1.1 request parser that ignores `Upgrade`, as RFC 9110, section 7.8, allows every server.

llhttp, the parser behind httptools, stops after a head that asks for another protocol, and takes the body for the
first bytes of that protocol. A server that answers in HTTP would then lose the body, or read it as another request.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import httptools

_OTHER_PROTOCOL = frozenset({b"upgrade", b"http2-settings"})  # connection options and names of headers
_CONNECT = b"CONNECT"  # opens a tunnel: llhttp reads no body, whatever the headers say
_VERSIONS = frozenset({"1.0", "1.1"})


class Requests(Protocol):
    """What is told of each request. url, headers: of the current one, with names in lower case."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Has the methods of httptools' parser that uvicorn calls.

    A head that asks for an upgrade is parsed again without that wish, together with its body.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.on_message_begin = requests.on_message_begin
        self.on_url = requests.on_url
        self.on_header = requests.on_header
        self.on_body = requests.on_body
        self._parser = self._new()

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # what follows a request with `connection: close` is dropped, without an error
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def feed_data(self, data: bytes) -> None:
        """Parse the next bytes of a connection. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = b"".join(self._plain_head()) + data[upgrade.args[0] :]
                self._parser = self._new()
            else:
                return

    def on_headers_complete(self) -> None:
        if not self._parser.should_upgrade() or self.get_method() == _CONNECT:
            self._requests.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._requests.on_message_complete()

    def _plain_head(self) -> Iterator[bytes]:
        """The current head without an upgrade."""
        yield b"%s %s HTTP/%s\r\n" % (self.get_method(), self._requests.url, self.get_http_version().encode())
        for name, value in self._requests.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(each for each in options if each.lower() not in _OTHER_PROTOCOL)
                if not value:
                    continue
            if name not in _OTHER_PROTOCOL:
                yield b"%s: %s\r\n" % (name, value)
        yield b"\r\n"

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return False


def refusal(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The status with which to refuse a head that llhttp accepts, but others may read otherwise; None to accept it."""
    if version not in _VERSIONS:
        return "505 HTTP Version Not Supported"
    if method == _CONNECT:
        return "405 Method Not Allowed"
    if sum(name == b"host" for name, _ in headers) > 1:
        return "400 Bad Request"
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        return "501 Not Implemented"
    return None
