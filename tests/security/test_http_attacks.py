"""Clients that stop, flood or do not read, at every point of HTTP: none keeps others out or grows memory.

The server has short timers here, and room for few connections, so that each attack is over soon. If this process
stands still for longer than a timer, honest requests are ended, too: the test is repeated.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import ENGINE, Running
from tests.support.again import again
from tests.support.tiers import default
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.server import launch, protocol
from xla_engine.server.bodies import BODIES
from xla_engine.server.protocol import Places
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings
from xla_engine.server.turns import PART_BYTES
from xla_engine.utils import json_line
from xla_engine.utils.json_line import load_object
from xla_engine.utils.resident import release_free_memory

PLACES = 64  # connections
KEY = b"authorization: Bearer alpha\r\n"
CHUNKED = b"host: x\r\ntransfer-encoding: chunked\r\n"
TEXT = b'{"prompt":"x","max_tokens":1}'
MB = 1 << 20


@pytest.fixture(scope="module")
def places() -> Places:
    """The server's connections."""
    return Places(PLACES)


@pytest.fixture(scope="module")
def running(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = ServerSettings(
        api_keys=("alpha", "beta"),
        header_timeout_s=0.5,
        body_timeout_s=0.5,
        send_timeout_s=0.5,
        max_body_bytes=MB,
        batch_dir=tmp_path_factory.mktemp("batches"),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(protocol, "Places", lambda limit: places)
        patched.setattr(protocol, "REST_S", 0.5)
        patched.setattr(protocol, "KEEP_ALIVE_S", 0.5)
        patched.setattr(launch, "KEEP_ALIVE_S", 3600)  # uvicorn's own timer, which data cancel
        service = Service(AsyncLLM.from_engine(XlaBatchEngine.from_pretrained(None, ENGINE)), limits)
        found = Running(service, max_connections=PLACES)
    # the kernel holds little
    found.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield found
    found.stop()


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    """The server; no connection or request may be left after a test."""
    yield running
    service = running.service
    running.wait_until(lambda: not running.server.server_state.connections)
    running.wait_until(lambda: service.live == 0 and service.bodies.shares.held == 0)


def connect(server: Running, receive_buffer: int | None = None) -> socket.socket:
    one = socket.socket()
    if receive_buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.settimeout(600)
    one.connect(("127.0.0.1", server.port))
    return one


def sent(one: socket.socket, data: bytes) -> bool:
    """Whether the server read all of it rather than closing the connection."""
    try:
        one.sendall(data)
    except OSError:
        return False
    return True


def head_of(one: socket.socket) -> bytes:
    """The status line and headers of an answer; empty if the server closed the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in answer and (part := one.recv(65536)):
            answer += part
    return answer


def until_closed(one: socket.socket) -> bytes:
    """What the server still sends; raises TimeoutError if it keeps the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := one.recv(65536):
            answer += part
    one.close()
    return answer


def others_are_served(server: Running) -> bool:
    with httpx.Client(base_url=server.url, timeout=1800) as client:
        asked = {"prompt": "x", "max_tokens": 1}
        answer = client.post("/v1/completions", json=asked, headers={"authorization": "Bearer beta"})
        return answer.status_code == 200 and client.get("/health").status_code == 200


def memory() -> int:
    """Resident bytes of this process, which contains the server."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * resource.getpagesize()


@contextlib.contextmanager
def grows_by_at_most(limit: int) -> Iterator[None]:
    """At no moment inside the block has memory grown by more than this."""
    gc.collect()
    release_free_memory()  # of an earlier attempt
    before, most, done = memory(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, memory())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert most - before <= limit, f"{(most - before) / MB:.0f} MB"


def upload(key: bytes) -> bytes:
    part = b"--B\r\ncontent-disposition: form-data; name="
    form = part + b'"purpose"\r\n\r\nbatch\r\n' + part + b'"file"; filename="a"\r\n\r\n{}\r\n--B--\r\n'
    return (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\n"
        + key
        + b"content-type: multipart/form-data; boundary=B\r\ncontent-length: %d\r\n\r\n" % len(form)
        + form
    )


def post(path: bytes, key: bytes, body: bytes, more: bytes = b"") -> bytes:
    return (
        b"POST "
        + path
        + b" HTTP/1.1\r\nhost: x\r\n"
        + key
        + more
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


def chunked(path: bytes, key: bytes, body: bytes) -> bytes:
    half = len(body) // 2
    parts = b"".join(b"%x;a=b\r\n%s\r\n" % (len(each), each) for each in (body[:half], body[half:]))
    return b"POST " + path + b" HTTP/1.1\r\n" + CHUNKED + key + b"\r\n" + parts + b"0\r\nx-trailer: y\r\n\r\n"


REQUESTS = {
    "get": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "old": b"GET /v1/models HTTP/1.0\r\n\r\n",
    "upgrade": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nx",
    "upgrade with a body": post(
        b"/tokenize", KEY, b'{"prompt":"x"}', b"upgrade: h2c\r\nconnection: upgrade\r\n"
    ),
    "no key": post(b"/v1/completions", b"", TEXT),
    "key": post(b"/v1/completions", KEY, TEXT),
    "expects": post(b"/v1/completions", KEY, TEXT, b"expect: 100-continue\r\n"),
    "chunks, no key": chunked(b"/v1/completions", b"", TEXT),
    "chunks": chunked(b"/v1/chat/completions", KEY, b'{"messages":[]}'),
    "no path": chunked(b"/nothing", KEY, TEXT),
    "tokenize": post(b"/tokenize", KEY, b'{"prompt":"x"}'),
    "responses": post(b"/v1/responses", KEY, b'{"input":"x","stream":true,"max_output_tokens":1}'),
    "upload": upload(KEY),
    "upload, no key": upload(b""),
    "two": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"/tokenize", KEY, b'{"prompt":"x"}'),
}


@again
def test_a_client_may_stop_at_any_byte(
    server: Running, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer ends the connection after any part of a request, and nothing of it is kept."""
    monkeypatch.setattr(places, "limit", None)  # so that only timers end connections
    begun = sorted({request[:end] for request in REQUESTS.values() for end in range(len(request) + 1)})
    for first in range(0, len(begun), 4 * PLACES):
        waiting = []
        for data in begun[first : first + 4 * PLACES]:
            one = connect(server)
            one.sendall(data)
            waiting.append((one, data))
        for one, data in waiting:
            try:
                until_closed(one)
            except TimeoutError:
                pytest.fail(f"still open after {data!r}")


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();  // asks for HTTP/2 by default
        for (int number = 0; number < 2; number++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/completions"))
                .header("authorization", "Bearer alpha")
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(arguments[1])).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body());
        }
    }
}
"""


@pytest.mark.full
@pytest.mark.parametrize("chunked", [False, True])
def test_curl_that_asks_for_http_2_gets_an_answer(server: Running, chunked: bool) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("needs curl")
    command = [
        curl,
        "--silent",
        "--show-error",
        "--http2",
        "--max-time",
        "600",
        "--data-binary",
        TEXT.decode(),
    ]
    command += ["-H", "authorization: Bearer alpha", "-H", "content-type: application/json"]
    command += ["-H", "transfer-encoding: chunked"] if chunked else []
    url = f"{server.url}/v1/completions"
    done = subprocess.run([*command, url, url], capture_output=True, text=True, check=True)
    assert done.stdout.count('"object":"text_completion"') == 2, done.stdout


@pytest.mark.full
def test_java_s_client_which_asks_for_http_2_gets_an_answer(server: Running, tmp_path: Path) -> None:
    if (java := shutil.which("java")) is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK")
    source = tmp_path / "Ask.java"
    source.write_text(JAVA)
    command = [java, str(source), server.url, TEXT.decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.count('200 HTTP_1_1 {"id":"cmpl-') == 2, done.stdout + done.stderr


EARLY = {
    "401": b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n",
    "401 upload": b"POST /v1/files HTTP/1.1\r\n" + CHUNKED + b"content-type: multipart/form-data\r\n\r\n",
    "404": b"POST /nothing HTTP/1.1\r\n" + CHUNKED + KEY + b"\r\n",
    "405": b"PUT /v1/completions HTTP/1.1\r\n" + CHUNKED + KEY + b"\r\n",
    "200": b"GET /health HTTP/1.1\r\n" + CHUNKED + b"\r\n",
    "413": b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + KEY + b"content-length: 99999999\r\n\r\n",
    "409": b"POST /v1/batches/batch_0/cancel HTTP/1.1\r\n" + CHUNKED + KEY + b"\r\n",
    "431": b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 200,
    "400": b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + KEY + b"x-request-timeout-ms: x\r\n\r\n",
}


@pytest.mark.parametrize("name", default(EARLY, 2))
@again
def test_an_answer_before_the_body_keeps_no_connection(server: Running, name: str) -> None:
    """The client continues its body for a moment after the answer, then stops."""
    waiting = []
    for _ in range(PLACES // 2):
        one = connect(server)
        assert sent(one, EARLY[name] + b"1\r\n{\r\n")
        waiting.append(one)
    for one in waiting:
        assert head_of(one).startswith(b"HTTP/1.1 ")
        sent(one, b"1\r\n{\r\n")
    assert others_are_served(server)
    for one in waiting:
        until_closed(one)


@again
def test_an_answer_before_the_body_is_read_by_who_still_sends(server: Running) -> None:
    """A client that sends everything before it reads gets the answer, not a reset, and may reuse the connection."""
    one = connect(server)
    one.sendall(post(b"/v1/completions", b"", b"x" * 300_000))
    assert head_of(one).startswith(b"HTTP/1.1 401")
    one.sendall(post(b"/tokenize", KEY, b'{"prompt":"x"}'))
    assert b"HTTP/1.1 200" in until_closed(one)


@pytest.mark.parametrize(
    "begins",
    default(
        [
            b"",
            b"GET /health HT",
            b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"\r\n1\r\n{\r\n",
            4 * b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
        ]
    ),
)
@again
def test_who_has_no_key_keeps_nobody_out(server: Running, begins: bytes) -> None:
    """Three times the allowed number of connections are held open; a running stream is not cut off."""
    stream = connect(server)
    body = b'{"prompt":"x","max_tokens":400,"ignore_eos":true,"stream":true}'
    stream.sendall(post(b"/v1/completions", KEY + b"connection: close\r\n", body))
    assert head_of(stream).startswith(b"HTTP/1.1 200")
    waiting = []
    for _ in range(3 * PLACES):
        one = connect(server, 4096)
        sent(one, begins)
        waiting.append(one)
        if len(waiting) % PLACES == 0:
            assert others_are_served(server)
    assert len(server.server.server_state.connections) <= PLACES
    assert b"data: [DONE]" in until_closed(stream)
    for one in waiting:
        until_closed(one)


@again
def test_a_request_that_comes_with_its_connection_finds_room(server: Running) -> None:
    """uvloop reads it before it reports the end of the connection that made room."""
    waiting = [connect(server) for _ in range(PLACES)]
    server.wait_until(lambda: len(server.server.server_state.connections) == PLACES, 5)
    server.loop.call_soon_threadsafe(time.sleep, 0.3)
    time.sleep(0.1)
    one = connect(server)
    one.sendall(post(b"/v1/completions", KEY + b"connection: close\r\n", TEXT))
    assert until_closed(one).startswith(b"HTTP/1.1 200")
    for each in waiting:
        until_closed(each)


@pytest.mark.full
@again
def test_more_connections_with_keys_than_there_may_be_get_503(server: Running) -> None:
    """The existing connections continue."""
    asked = b'{"prompt":"x","max_tokens":150,"ignore_eos":true,"stream":true}'
    streams = []
    for _ in range(PLACES):
        one = connect(server)
        one.sendall(post(b"/v1/completions", KEY + b"connection: close\r\n", asked))
        streams.append(one)
    for one in streams:
        assert head_of(one).startswith(b"HTTP/1.1 200")
    late = connect(server)
    late.sendall(post(b"/tokenize", KEY, b'{"prompt":"x"}'))
    assert until_closed(late).startswith(b"HTTP/1.1 503")
    assert all(b"data: [DONE]" in until_closed(one) for one in streams)


def floods() -> dict[str, tuple[bytes, bytes]]:
    """The first bytes of a connection, and the bytes that it then sends endlessly."""
    begun = b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"%s\r\n"
    found = {
        "line": (b"GET /", b"y" * 65536),
        "method": (b"", b"G" * 65536),
        "empty lines": (b"", b"\r\n" * 32768),
        "value": (b"GET /health HTTP/1.1\r\nx: ", b"y" * 65536),
        "name": (b"GET /health HTTP/1.1\r\n", b"y" * 65536),
        "headers": (b"GET /health HTTP/1.1\r\n", b"a:\r\n" * 16384),
        "pipeline": (b"", b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 2000),
    }
    for name, key in {"": b"", " with a key": KEY}.items():
        begin = begun % key
        found |= {
            "size" + name: (begin, b"0" * 65536),
            "extension" + name: (begin + b"1;", b"y" * 65536),
            "extensions" + name: (begin, (b"1;" + b"y" * 60000 + b"\r\nx\r\n")),
            "trailers" + name: (begin + b"0\r\n", b"x: " + b"y" * 60000 + b"\r\n"),
            "small trailers" + name: (begin + b"0\r\n", b"a:\r\n" * 16384),
            "trailer" + name: (begin + b"1\r\n{\r\n0\r\nx: ", b"y" * 65536),
            "body" + name: (begin, b"10000\r\n" + b"y" * 65536 + b"\r\n"),
            "bytes" + name: (begin, b"1\r\ny\r\n" * 10000),
        }
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*floods()] * 2, id="two of each"),
        *(pytest.param([name] * 16, id=name, marks=pytest.mark.full) for name in floods()),
    ],
)
@again
def test_a_flood_in_any_part_of_http_ends(server: Running, names: list[str]) -> None:
    """Every connection ends, and memory does not grow, with two connections of each kind or sixteen of one."""
    ended = []

    def flood(begin: bytes, without_end: bytes) -> None:
        one = connect(server, 4096)
        until = time.monotonic() + 600
        going_on = sent(one, begin)
        while going_on and time.monotonic() < until:
            going_on = sent(one, without_end)
        ended.append(not going_on)
        one.close()

    threads = [threading.Thread(target=flood, args=floods()[name]) for name in names]
    with grows_by_at_most(2 * MB * len(names)):
        for thread in threads:
            thread.start()
        assert others_are_served(server)
        for thread in threads:
            thread.join()
    assert ended == [True] * len(names)


@pytest.mark.parametrize("where", default(["head", "trailers"]))
@pytest.mark.parametrize(
    ("fields", "is_taken"),
    [
        (b"a:\r\n" * 90, True),
        (b"a:\r\n" * 101, False),
        (b"a: " + b"y" * 15_000 + b"\r\n", True),
        (b"a: " + b"y" * 17_000 + b"\r\n", False),
        ((b"a: " + b"y" * 1700 + b"\r\n") * 10, False),
    ],
)
@again
def test_fields_are_bounded_in_number_and_size(
    server: Running, where: str, fields: bytes, is_taken: bool
) -> None:
    """A field of 4 bytes costs 150 bytes of memory."""
    one = connect(server)
    head, trailers = (fields, b"") if where == "head" else (b"", fields)
    request = b"POST /tokenize HTTP/1.1\r\n" + CHUNKED + KEY + head + b"\r\n"
    sent(one, request + b'e\r\n{"prompt":"x"}\r\n0\r\n' + trailers + b"\r\n")
    answer = until_closed(one)
    assert answer.startswith(b"HTTP/1.1 200") if is_taken else b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize("closes", default([False, True]))
@pytest.mark.parametrize("what", ["response", "file", "metrics"])
@again
def test_answers_that_are_not_read_are_not_held(server: Running, what: str, closes: bool) -> None:
    """Answers of 15 MB each for twenty clients, and many small answers of 1 MB in all."""
    kept = {"id": "resp_x", "text": "x" * (15 * MB)}
    responses = next(
        route.endpoint.__self__
        for route in server.server.config.loaded_app.app.routes
        if getattr(route, "path", "") == "/v1/responses/{id}"
    )
    tenant = hashlib.sha256(b"alpha").hexdigest()[:16]
    path, times = b"/metrics", 4
    if what == "response":
        responses.memory.keep(tenant, kept, [])
        path, times = b"/v1/responses/resp_x", 1
    elif what == "file":
        answer = httpx.post(
            f"{server.url}/v1/files",
            files={"file": ("a.jsonl", b"x" * (15 * MB))},
            data={"purpose": "batch"},
            headers={"authorization": "Bearer alpha"},
            timeout=1800,
        )
        path, times = b"/v1/files/" + answer.json()["id"].encode() + b"/content", 1
    ask = b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + KEY
    with grows_by_at_most(20 * MB):
        waiting = []
        for _ in range(20):
            one = connect(server, 4096)
            one.sendall((ask + b"\r\n") * (times - closes) + (ask + b"connection: close\r\n\r\n") * closes)
            waiting.append(one)
        assert others_are_served(server)
        for connection in list(server.server.server_state.connections):
            if connection.transport is not None:
                assert connection.transport.get_write_buffer_size() <= 3 * PART_BYTES
        server.wait_until(lambda: not server.server.server_state.connections)
    for one in waiting:
        one.close()


@again
def test_tokens_are_made_as_clients_take_them(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's clients leave as many texts unread as it may have; one more is refused, another key's is not."""
    info = next(
        route.endpoint.__self__
        for route in server.server.config.loaded_app.app.routes
        if getattr(route, "path", "") == "/tokenize"
    )
    monkeypatch.setattr(info._shares, "_most", MB)
    body = json.dumps({"prompt": "a = 1\n" * 16_000, "return_token_strs": True}).encode()  # 96,000 characters
    waiting = []
    for _ in range(5):
        one = connect(server, 4096)
        one.sendall(post(b"/tokenize", KEY, body))
        waiting.append(one)
    server.wait_until(lambda: info._shares.held == 480_000, 5)
    late = connect(server)
    late.sendall(post(b"/tokenize", KEY + b"connection: close\r\n", body))
    assert until_closed(late).startswith(b"HTTP/1.1 429")
    other = httpx.post(
        f"{server.url}/tokenize", content=body, headers={"authorization": "Bearer beta"}, timeout=1800
    )
    assert other.status_code == 200 and len(other.json()["token_strs"]) == other.json()["count"]
    for connection in list(server.server.server_state.connections):
        assert connection.transport.get_write_buffer_size() <= 3 * PART_BYTES
    server.wait_until(lambda: info._shares.held == 0)  # by the timer of sends
    for one in waiting:
        one.close()


SHAPES = {
    "objects": (b'{"prompt":[', b"{},", b"{}]}"),
    "lists": (b'{"prompt":[', b"[],", b"[]]}"),
    "nested": (b'{"prompt":[', b"[" * 60 + b"]" * 60 + b",", b"[]]}"),
    "strings": (b'{"prompt":[', b'"",', b'""]}'),
    "names": (b'{"x":0', b',"":0', b"}"),
    "half": (b'{"prompt":[', b"[{", b""),
    "quotes": (b"", b'"', b""),
}


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/v1/completions", shape) for shape in SHAPES]
    + [(path, "objects") for path in ("/v1/responses", "/tokenize", "/detokenize")],
)
@again
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    server: Running, path: str, shape: str
) -> None:
    begin, part, end = SHAPES[shape]
    body = begin + part * ((MB - 100) // len(part)) + end
    with grows_by_at_most(8 * MB):
        answer = httpx.post(
            server.url + path, content=body, headers={"authorization": "Bearer alpha"}, timeout=1800
        )
    assert answer.status_code == 400
    assert "65536 strings, names, lists and objects" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [b"1", b"0.5"])
def test_a_prompt_of_many_numbers_is_parsed_while_other_threads_go_on(
    monkeypatch: pytest.MonkeyPatch, number: bytes
) -> None:
    """The event loop is such a thread. Token ids are limited by the body's bytes only."""
    raw = b'{"prompt":[' + (number + b",") * 1_000_000 + number + b"]}"
    done, turns, within = threading.Event(), 0, []
    loads = json.loads

    def counted(*args: Any, **options: Any) -> Any:
        before = turns
        try:
            return loads(*args, **options)
        finally:
            within.append(turns - before)

    def others() -> None:
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    monkeypatch.setattr(json_line.json, "loads", counted)
    thread = threading.Thread(target=others)
    thread.start()
    assert len(load_object(raw)["prompt"]) == 1_000_001
    done.set()
    thread.join()
    assert within[0] > 3


values = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.sampled_from(['"', "\\", '\\"[{']),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=40,
)


def count(value: Any) -> int:
    """Strings, names, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return int(isinstance(value, str))


@settings(max_examples=60, deadline=None)
@given(value=values, part=st.integers(1, 20), ascii_only=st.booleans())
def test_values_are_counted_as_the_parser_finds_them(value: Any, part: int, ascii_only: bool) -> None:
    """A line may be cut anywhere: within an escape, a string, or a character."""
    raw = json.dumps({"x": value}, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_line, "_SCANNED", part)
        assert sum(json_line._values(raw)) == count({"x": value})
        patched.setattr(json_line, "MAX_VALUES", count({"x": value}) - 1)
        if len(raw) > json_line.MAX_VALUES:
            with pytest.raises(ValueError, match="strings, names, lists and objects"):
                load_object(raw)
        patched.setattr(json_line, "MAX_VALUES", count({"x": value}))
        assert load_object(raw) == {"x": value}


@pytest.mark.full
@again
def test_large_bodies_of_one_key_leave_room_for_others(server: Running) -> None:
    """One key's bodies may take half of the total; a body of usual size is never refused because of them."""
    body = b'{"prompt":"' + b"x" * (MB - 1000)
    waiting, refused = [], 0
    for _ in range(BODIES):
        one = connect(server)
        one.sendall(post(b"/tokenize", KEY, body + b"..")[:-2])
        waiting.append(one)
    server.wait_until(lambda: server.service.bodies.shares.held > (BODIES // 2 - 1) * (MB - (80 << 10)), 5)
    assert others_are_served(server)
    whole = json.dumps({"prompt": "x" * (MB - 1000)})
    other = httpx.post(
        f"{server.url}/tokenize", content=whole, headers={"authorization": "Bearer beta"}, timeout=1800
    )
    assert other.status_code == 200
    assert server.service.bodies.shares.held <= BODIES // 2 * MB
    for one in waiting:
        refused += until_closed(one).startswith(b"HTTP/1.1 429")
    assert refused >= BODIES // 2 - 1


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
LABELLED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
}
WRONG: list[tuple[str, Any]] = [
    ("metadata", 5),
    ("metadata", {"a": 5}),
    ("metadata", {"a": {"b": "c"}}),
    ("metadata", {"a": None}),
    ("metadata", {"a": "x" * 513}),
    ("metadata", {"x" * 65: "a"}),
    ("metadata", {str(number): "a" for number in range(17)}),
    ("user", {}),
    ("user", 5),
    ("user", "x" * 513),
    ("safety_identifier", ["x"]),
    ("prompt_cache_key", "x" * 100_000),
    ("service_tier", "best"),
    ("service_tier", {}),
    ("store", "yes"),
    ("parallel_tool_calls", 1),
]


@pytest.mark.parametrize("path", default(LABELLED))
@pytest.mark.parametrize(("name", "value"), WRONG)
@again
def test_labels_have_openai_s_types_and_sizes(server: Running, path: str, name: str, value: Any) -> None:
    body = {**LABELLED[path], name: value}
    answer = httpx.post(
        server.url + path, json=body, headers={"authorization": "Bearer alpha"}, timeout=1800
    ).json()
    assert answer["error"]["param"] == name and answer["error"]["code"] == "invalid_request"
    assert len(answer["error"]["message"]) < 600


@pytest.mark.parametrize("path", LABELLED)
@again
def test_labels_within_bounds_are_taken(server: Running, path: str) -> None:
    most = {f"{number:064}": "x" * 512 for number in range(16)}
    body = {**LABELLED[path], "metadata": most, "user": "x" * 512, "service_tier": "auto", "store": False}
    answer = httpx.post(server.url + path, json=body, headers={"authorization": "Bearer alpha"}, timeout=1800)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:  # the embedded model has no template for chats
        assert answer.json()["error"]["param"] not in ("metadata", "user", "service_tier", "store")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"effort": ["low"]}}, "reasoning.effort"),
        ({"reasoning": {"summary": {}}}, "reasoning.summary"),
        ({"reasoning": {"x": "y"}}, "reasoning.x"),
        ({"text": {"x": "y" * 100_000}}, "text.x"),
    ],
)
@again
def test_parts_of_a_response_s_fields_are_checked(server: Running, field: dict[str, Any], param: str) -> None:
    body = {"input": "x", **field}
    headers = {"authorization": "Bearer alpha"}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=1800)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@again
def test_the_effort_of_a_chat_is_a_string(server: Running) -> None:
    headers = {"authorization": "Bearer alpha"}
    body = {**CHAT, "reasoning_effort": 5}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=1800)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.full
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_an_idle_server_and_a_second_one_a_busy_one(tmp_path: Path, signals: int) -> None:
    """The server is started as a user would, with a lower limit of open files than of connections."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "xla_engine", "serve", "--port", "0", "--drain-timeout", "3600"]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 512; exec "$@"', "sh", *command], stderr=file, stdout=file
        )
    try:
        while "running on http" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        assert "--max-connections is 256, not 4096" in log.read_text()
        if signals == 2:
            url = next(word for word in log.read_text().split() if word.startswith("http://"))
            one = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1800)
            body = b'{"prompt":"x","n":128,"temperature":1,"max_tokens":400,"ignore_eos":true,"stream":true}'
            one.sendall(post(b"/v1/completions", b"", body))
            assert one.recv(4096)
            process.terminate()
            while "draining" not in log.read_text():
                assert process.poll() is None
                time.sleep(0.01)
            process.terminate()
            assert process.wait(600) == -signal.SIGTERM, "it waits for what is under way"
            one.close()
        else:
            process.terminate()
            assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
