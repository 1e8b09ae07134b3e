"""One request, one answer: whatever the bytes of a connection, nobody reads other requests in them than the server.

The requests of the tables are those on which public lists of request smuggling try servers and proxies: lengths that
contradict each other, damaged chunks, folded and split fields, bytes after the end, and other protocols.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from tests.support.profiles import examples
from tests.support.tiers import default
from xla_engine.server.protocol import limited_protocol
from xla_engine.server.settings import ServerSettings

BODY = b'{"prompt":"x"}'
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
SENT = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"
Told = list[tuple[str, str, bytes]]  # method, path and body of each request that the application was told of


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it was asked. Below /early it answers before it reads the body."""
    if scope["type"] != "http":
        return
    body, more = b"", not scope["path"].startswith("/early")
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        body, more = body + message["body"], message["more_body"]
    names = [name.decode("latin-1") for name, _ in scope["headers"]]
    told = json.dumps([scope["method"], scope["path"], body.decode("latin-1"), names]).encode() + b"\n"
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]}
    )
    await send({"type": "http.response.body", "body": told})


class Wire:
    """A transport that keeps what is written, and says whether the server reads."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str) -> None:
        return None


class Echo:
    """The server's protocol with an application that tells what it was asked."""

    def __init__(self) -> None:
        make: Any = limited_protocol(ServerSettings(), 64)
        config = uvicorn.Config(
            echo, http=make, ws="none", lifespan="off", log_config=None, server_header=False
        )
        self._make = partial(make, config, ServerState(), {})

    def answers(self, sent: bytes, cuts: Sequence[int] = ()) -> bytes:
        """All that comes back for the bytes of a connection, which are sent in pieces."""

        async def talk() -> bytes:
            connection, wire = self._make(_loop=asyncio.get_running_loop()), Wire()
            connection.connection_made(wire)
            for begin, end in zip((0, *cuts), (*cuts, len(sent)), strict=True):
                await quiet()
                assert not wire.paused, "it stopped reading for good"
                if begin < end and not wire.closed:
                    connection.data_received(sent[begin:end])
            await quiet()
            connection.connection_lost(None)
            return wire.written

        return asyncio.run(talk())


async def quiet() -> None:
    """Until nothing is left to do but wait for the client."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def server() -> Echo:
    return Echo()


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def told(answers: bytes) -> Told:
    found = [json.loads(line) for line in re.findall(rb'^\["[A-Z]+", .*\]$', answers, re.MULTILINE)]
    return [(method, path, body.encode("latin-1")) for method, path, body, _ in found]


def request(*fields: bytes, body: bytes = b"", line: bytes = b"POST /a HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"host: x", *fields, b"", body])


def length(value: bytes) -> bytes:
    return request(b"content-length:" + value, body=BODY)


def coding(value: bytes) -> bytes:
    return request(b"transfer-encoding:" + value, body=SENT)


def chunks(body: bytes) -> bytes:
    return request(CHUNKED[:-2], body=body)


def chunk(size: bytes = b"e\r\n", end: bytes = b"\r\n", last: bytes = b"0\r\n\r\n") -> bytes:
    return chunks(size + BODY + end + last)


POST = [("POST", "/a", BODY)]
GET = [("GET", "/a", b"")]
WITHIN = [("POST", "/a", NEXT)]
LINE = b"GET /a HTTP/1.1\r\n"

# What the application is told; the next request is told, too.
TAKEN: dict[str, tuple[bytes, Told]] = {
    "a length": (length(b" 14"), POST),
    "a length with blanks": (length(b"\t14 \t"), POST),
    "a length with zeros": (length(b"0014"), POST),
    "chunks": (coding(b" chunked"), POST),
    "chunks in capitals": (coding(b" CHUNKED"), POST),
    "a size with zeros": (chunk(b"000e\r\n"), POST),
    "a size in capitals": (chunk(b"E\r\n"), POST),
    "an extension": (chunk(b"e;a=b\r\n"), POST),
    "an extension in quotes": (chunk(b'e;a="b;c"\r\n'), POST),
    "two chunks": (chunks(b"4\r\n" + BODY[:4] + b"\r\na\r\n" + BODY[4:] + b"\r\n0\r\n\r\n"), POST),
    "trailers": (chunk(last=b"0\r\nx: y\r\nhost: z\r\n\r\n"), POST),
    "trailers of an upgrade": (chunk(last=b"0\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"), POST),
    "a request as a body": (request(b"content-length: %d" % len(NEXT), body=NEXT), WITHIN),
    "a request as a chunk": (chunks(b"%x\r\n%s\r\n0\r\n\r\n" % (len(NEXT), NEXT)), WITHIN),
    "GET with a body": (request(b"content-length: 14", body=BODY, line=LINE[:-2]), [("GET", "/a", BODY)]),
    "GET with chunks": (request(CHUNKED[:-2], body=SENT, line=LINE[:-2]), [("GET", "/a", BODY)]),
    "an answer before the body": (
        request(b"content-length: %d" % len(NEXT), body=NEXT, line=b"POST /early HTTP/1.1"),
        [("POST", "/early", b"")],
    ),
    "an answer before the chunks": (
        request(CHUNKED[:-2], body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(NEXT), NEXT), line=b"GET /early HTTP/1.1"),
        [("GET", "/early", b"")],
    ),
    "an odd expectation": (request(b"expect: y 100-continue", b"content-length: 14", body=BODY), POST),
    "empty lines before": (b"\r\n\r\n" + request(line=LINE[:-2]), GET),
    "an address": (request(line=b"GET http://x/a HTTP/1.1"), GET),
    "a field with an underscore": (request(b"content_length_: 5", line=LINE[:-2]), GET),
}  # fmt: skip

# Told, after which the connection ends without the next request.
ENDED: dict[str, tuple[bytes, Told]] = {
    "closed": (request(b"connection: close", line=LINE[:-2]), GET),
    "HTTP/1.0": (request(line=b"GET /a HTTP/1.0"), GET),
    "chunks in HTTP/1.0": (request(CHUNKED[:-2], body=SENT, line=b"POST /a HTTP/1.0"), POST),
    "closed with an upgrade": (
        request(b"connection: upgrade, close", b"upgrade: x", b"content-length: 14", body=BODY),
        POST,
    ),
}  # fmt: skip

# Refused with one answer, which ends the connection.
REFUSED: dict[str, bytes] = {
    "length and chunks": request(b"content-length: 5", CHUNKED[:-2], body=SENT),
    "chunks and length": request(CHUNKED[:-2], b"content-length: 5", body=SENT),
    "length, twice": request(b"content-length: 14", b"content-length: 14", body=BODY),
    "two lengths": request(b"content-length: 14", b"content-length: 0", body=BODY),
    **{
        f"length {value!r}": length(b" " + value)
        for value in (
            b"", b"+14", b"-14", b"14, 14", b"14,0", b"0xe", b"1 4", b"1e1", b"14;", b"14\x0b", b"14_", b"\xb2",
            b"99999999999999999999", b"18446744073709551630", b"1\r\n 4",
        )
    },
    **{
        f"coding {value!r}": coding(b" " + value)
        for value in (
            b"", b"identity", b"xchunked", b"chunkedx", b"chunked, identity", b"chunked, chunked", b"gzip, chunked",
            b"identity, chunked", b",chunked", b"chunked,", b'"chunked"', b"chunked;q=1", b"\x0bchunked",
            b"chunked\x0c", b"\r\n chunked", b"chunked\r\n , identity", b"chunked\r\ntransfer-encoding: chunked",
            b"identity\r\ntransfer-encoding: chunked", b"chunked\r\ntransfer-encoding: identity",
        )
    },
    **{
        f"field {name!r}": request(name + b": chunked", body=SENT)
        for name in (
            b"transfer-encoding ", b"transfer-encoding\t", b" transfer-encoding", b"transfer-encoding\x00",
            b"transfer-encoding\x0b", b"x: y\ntransfer-encoding", b"x: y\rtransfer-encoding", b"(transfer-encoding)",
        )
    },
    **{
        f"size {size!r}": chunk(size)
        for size in (
            b"\r\n", b" e\r\n", b"e \r\n", b"+e\r\n", b"-e\r\n", b"0xe\r\n", b"g\r\n", b"0_e\r\n", b"e\n", b"e\r",
            b"e;\r\n", b"e ;a=b\r\n", b"e;a=\x01\r\n", b"e;a\nb\r\n", b"e;a\rb\r\n", b'e;a="\n"\r\n',
            b"10000000000000000e\r\n",
        )
    },
    **{f"after a chunk {end!r}": chunk(end=end) for end in (b"", b"\n", b"\r", b"X\r\n", b"XX", b"\n\r")},
    **{
        f"last {last!r}": chunk(last=last)
        for last in (
            b"0\n\n", b"0\r\n\n", b"0\r\nx y\r\n\r\n", b"0\r\n x: y\r\n\r\n",
            b"0\r\ntransfer-encoding: chunked\r\n\r\n", b"0\r\ncontent-length: 5\r\n\r\n",
        )
    },
    "lines that end in LF": b"GET /a HTTP/1.1\nhost: x\n\n",
    "a field that ends in LF": LINE + b"host: x\n\r\n",
    "a head that ends in LF": LINE + b"host: x\r\n\n",
    "CR in a value": request(b"x: a\rb", line=LINE[:-2]),
    "CR CR LF": LINE + b"host: x\r\r\n\r\n",
    "NUL in a value": request(b"x: a\x00b", line=LINE[:-2]),
    "a folded field": request(b"x: y\r\n z", line=LINE[:-2]),
    "a first line that is folded": LINE + b" x: y\r\nhost: x\r\n\r\n",
    "a field without colon": request(b"x", line=LINE[:-2]),
    "a field without name": request(b": x", line=LINE[:-2]),
    "two hosts": request(b"host: y", line=LINE[:-2]),
    "no version": b"GET /a\r\n\r\n",
    **{
        f"line {line!r}": request(line=line)
        for line in (
            b"GET /a HTTP/0.9", b"GET /a HTTP/1.2", b"GET /a HTTP/2.0", b"GET /a HTTP/11", b"GET /a HTTP/1.1 ",
            b"GET /a http/1.1", b"GET\t/a HTTP/1.1", b"GET /a b HTTP/1.1", b" GET /a HTTP/1.1", b"get /a HTTP/1.1",
            b"GET /a HTTP/1.1\rx: y", b"FETCH /a HTTP/1.1", b"CONNECT x:80 HTTP/1.1", b"GET /\x00 HTTP/1.1",
        )
    },
    "CONNECT with a body": request(b"content-length: 14", body=BODY, line=b"CONNECT x:80 HTTP/1.1"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "an upgrade with length and chunks": request(
        b"connection: upgrade", b"upgrade: h2c", b"content-length: 5", CHUNKED[:-2], body=SENT
    ),
    "an upgrade with two codings": request(
        b"connection: upgrade", b"upgrade: h2c", b"transfer-encoding: gzip, chunked", body=SENT
    ),
}  # fmt: skip

UPGRADES: dict[str, bytes] = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
    "websocket": b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    "TLS": b"upgrade: TLS/1.0\r\nconnection: upgrade",
    "two": b"upgrade: foo\r\nconnection: keep-alive\r\nupgrade: bar/2, h2c\r\nconnection: upgrade",
    "empty": b"upgrade:\r\nconnection: upgrade",
    "without connection": b"upgrade: h2c",
    "without upgrade": b"connection: upgrade",
}  # fmt: skip
for name, fields in UPGRADES.items():
    TAKEN |= {
        f"upgrade to {name}": (request(fields, line=LINE[:-2]), GET),
        f"upgrade to {name} with a body": (request(fields, b"content-length: 14", body=BODY), POST),
        f"upgrade to {name} with chunks": (request(CHUNKED[:-2], fields, body=SENT), POST),
        f"upgrade to {name} with a request": (
            request(b"content-length: %d" % len(NEXT), fields, body=NEXT),
            WITHIN,
        ),
        f"upgrade to {name}, answered early": (
            request(fields, b"content-length: %d" % len(NEXT), body=NEXT, line=b"POST /early HTTP/1.1"),
            [("POST", "/early", b"")],
        ),
        f"upgrade to {name}, twice": (2 * request(fields, b"content-length: 14", body=BODY), 2 * POST),
    }
AFTER = [("GET", "/next", b""), ("GET", "/last", b"")]


@pytest.mark.parametrize("is_cut", default([False, True]))
@pytest.mark.parametrize("name", TAKEN)
def test_a_request_has_one_answer_and_the_body_of_its_length(server: Echo, name: str, is_cut: bool) -> None:
    sent, expected = TAKEN[name]
    whole = sent + NEXT + LAST
    answers = server.answers(whole, tuple(range(1, len(whole))) if is_cut else ())
    assert told(answers) == expected + AFTER
    assert statuses(answers) == [200] * len(expected + AFTER)


@pytest.mark.parametrize("name", ENDED)
def test_nothing_is_read_after_the_last_request(server: Echo, name: str) -> None:
    sent, expected = ENDED[name]
    answers = server.answers(sent + NEXT + LAST)
    assert told(answers) == expected and statuses(answers) == [200]


@pytest.mark.parametrize("is_cut", default([False, True]))
@pytest.mark.parametrize("name", REFUSED)
def test_what_others_may_read_otherwise_is_refused_and_ends_the_connection(
    server: Echo, name: str, is_cut: bool
) -> None:
    whole = REFUSED[name] + NEXT + LAST
    answers = server.answers(whole, tuple(range(1, len(whole))) if is_cut else ())
    assert not told(answers)
    assert len(found := statuses(answers)) == 1 and 400 <= found[0] < 600


def test_fields_of_the_upgrade_are_not_told_and_others_are(server: Echo) -> None:
    sent = request(UPGRADES["h2c"], b"x-request-id: 7", b"content-length: 14", body=BODY)
    (line,) = re.findall(rb"^\[.*\]$", server.answers(sent + LAST), re.MULTILINE)[:1]
    assert json.loads(line)[3] == ["host", "x-request-id", "content-length"]


def test_a_client_that_expects_an_answer_before_its_body_gets_it_with_an_upgrade(server: Echo) -> None:
    sent = request(UPGRADES["h2c"], b"expect: 100-continue", b"content-length: 14", body=BODY)
    assert statuses(server.answers(sent + LAST)) == [100, 200, 200]


@pytest.mark.parametrize("trailers", [b"x-a: y\r\n", b"x-a: y\r\nx-b: z\r\n"])
def test_trailers_are_not_fields_of_the_next_request(server: Echo, trailers: bytes) -> None:
    sent = chunk(last=b"0\r\n" + trailers + b"\r\n")
    lines = re.findall(rb"^\[.*\]$", server.answers(sent + NEXT + LAST), re.MULTILINE)
    assert [json.loads(line)[3] for line in lines[1:]] == [["host"], ["host", "connection"]]


def read_by_h11(data: bytes) -> Told:
    """The requests that another parser finds, up to the first that it refuses or that is not whole."""
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    connection.receive_data(b"")
    try:
        while isinstance(head := connection.next_event(), h11.Request):
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                break
            path = re.sub(rb"^http://[^/]*", b"", bytes(head.target)).decode("latin-1")
            found.append((head.method.decode(), path, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except h11.ProtocolError:
        pass
    return found


UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
PIECES = [
    b"POST /a HTTP/1.1\r\n", b"GET /b HTTP/1.1\r\n", b"POST /c HTTP/1.0\r\n", b"host: x\r\n", b"\r\n", b"\n", b"\r",
    b"content-length: 5\r\n", b"content-length: 0\r\n", b"Content-Length: 33\r\n", CHUNKED, UPGRADE, b" ", b"\t",
    b"Transfer-Encoding: x\r\n", b"connection: close\r\n", b"x: y\r\n", b"5\r\n", b"5;a=b\r\n", b"0\r\n", b"a",
    b"hello", b"hello\r\n", b"0\r\n\r\n", b"21\r\n", NEXT, b"\x00", b":", b";",
]  # fmt: skip
HEAD = [b"POST /a HTTP/1.1\r\n", b"host: x\r\n"]


@settings(max_examples=examples(150, 3000), deadline=None)
@given(
    begin=st.sampled_from([[], HEAD, [*HEAD, CHUNKED, b"\r\n"], [*HEAD, UPGRADE, CHUNKED]]),
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
@example([*HEAD, UPGRADE, CHUNKED, b"\r\n"], [b"5\r\n", b"hello\r\n", b"0\r\n\r\n", NEXT], [])
def test_another_parser_finds_the_same_requests(
    server: Echo, begin: list[bytes], pieces: list[bytes], cuts: list[int]
) -> None:
    """As far as both accept them, and however the bytes are cut."""
    data = b"".join([*begin, *pieces])
    whole = told(server.answers(data))
    assert told(server.answers(data, sorted(min(cut, len(data)) for cut in cuts))) == whole
    for ours, theirs in zip(whole, read_by_h11(data), strict=False):
        assert ours == theirs
