"""Clients of a server.

Honest ones: their requests, and the answers that they must get, to the bit.

Hostile ones, which stop, flood, do not read, or send invalid data: each is a function of a client of the server and a
random generator that returns the status of the server's answer, None if there was none. A 5xx is never right.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import httpx

from xla_engine.openai.fields import LABELS, LINE_FIELDS
from xla_engine.sampling_params import SamplingParams

HOST = "127.0.0.1"
HONEST, HOSTILE = "honest", "hostile"  # keys
PATIENCE_S = 60.0  # for an answer: a client that gets none in this time is locked out
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"

Body = tuple[str, dict[str, Any]]  # path and body
Choices = list[dict[str, Any]]


def open_client(port: int) -> httpx.Client:
    """An honest client of a server of this machine, for any number of threads."""
    return httpx.Client(
        base_url=f"http://{HOST}:{port}",
        headers={"authorization": f"Bearer {HONEST}", "connection": "close"},
        timeout=PATIENCE_S,
        trust_env=False,
    )


def draw_bodies(draw: random.Random, count: int) -> list[Body]:
    """Requests that have the same answer every time."""
    return [_body(draw) for _ in range(count)]


def _body(draw: random.Random) -> Body:
    options: dict[str, Any] = {"max_tokens": draw.randint(1, 32), "seed": draw.randrange(1000)}
    options["temperature"] = draw.choice((0, 0.7, 1.0))
    if options["temperature"] and draw.random() < 0.3:
        options["n"] = 2
    if draw.random() < 0.2:
        options["stop"] = draw.choice(("\n", " ", "self"))
    if draw.random() < 0.3:
        options["top_p"] = draw.choice((0.5, 0.9))
    if draw.random() < 0.2:
        options["ignore_eos"] = True
    text = "".join(draw.choice("def add(a, b):\n    return x = 1") for _ in range(draw.randint(1, 40)))
    if draw.random() < 0.3:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {
            "messages": messages,
            "logprobs": True,
            "top_logprobs": draw.randrange(3),
            **options,
        }
    options["echo"] = draw.random() < 0.2
    return "/v1/completions", {"prompt": text, "logprobs": draw.randrange(3), **options}


def answer_of(client: httpx.Client, body: Body, *, stream: bool) -> Choices:
    """What a server answers, whole or streamed, in one form. Raises RuntimeError for what is no result, and
    httpx.HTTPError."""
    path, options = body
    until = time.monotonic() + PATIENCE_S
    answer = client.post(path, json={**options, "stream": stream})
    while answer.status_code == 429 and time.monotonic() < until:  # a full queue is no error
        answer = client.post(path, json={**options, "stream": stream})
    if answer.status_code != 200:
        raise RuntimeError(f"{path} is answered {answer.status_code}: {answer.text[:200]}")
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    if stream and parts.pop() != "[DONE]":
        raise RuntimeError("a stream ends without [DONE]")
    found: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, parts):
        if "error" in event:
            raise RuntimeError(f"a stream has an error: {event['error']}")
        for piece in event["choices"]:
            choice = found.setdefault(piece["index"], {"text": "", "finish_reason": None})
            said = piece.get("message") or piece.get("delta") or {}
            choice["text"] += piece["text"] if "text" in piece else said.get("content") or ""
            choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                if values:
                    choice.setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


Horror = Callable[[httpx.Client, random.Random], int | None]

_HEADERS = {"authorization": f"Bearer {HOSTILE}"}
_HOSTILE_PATIENCE_S = 1.0  # of a hostile client
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/batches",
)
_FLOOD = 16 << 20  # bytes, about
_FIELDS = (  # of the bodies that these take
    *sorted(LINE_FIELDS | LABELS),
    *(each.name for each in fields(SamplingParams)),
    *("input", "stream", "text", "reasoning", "instructions", "tokens", "top_logprobs"),
    *("input_file_id", "endpoint", "completion_window"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 5, 2**31, 10**400, -1e308, 1e400, "", "x", "\ud800", "x" * 20_000, "\0", "[" * 2000),
    *(
        [],
        [[]],
        {},
        [{}] * 500,
        [None],
        {"a": {"b": [1]}},
        [[1] * 60] * 3,
        [10**9],
        {"9" * 400: 1},
        ["x"] * 200,
    ),
    *(
        {"regex": "(a{99}){99}"},
        {"json": {"type": 7}},
        {"type": "json_schema"},
        [{"role": "user", "content": "x"}],
    ),
)


def stops_somewhere(client: httpx.Client, draw: random.Random) -> int | None:
    """Sends the beginning of a good request, in pieces, and goes away or is silent."""
    data = _request("/v1/completions", {"prompt": "x", "max_tokens": 8, "stream": draw.random() < 0.5})
    cut = draw.randrange(len(data))
    first = draw.randrange(cut + 1)
    return _send(client, (data[:first], data[first:cut]), wait_s=draw.choice((0.0, _HOSTILE_PATIENCE_S)))


def does_not_read(client: httpx.Client, draw: random.Random) -> int | None:
    """Requests a large answer, reads none of it, and stays connected for a while."""
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "n": 4, "logprobs": 5, "echo": True}
    with _connect(client) as connection:
        connection.sendall(_request("/v1/completions", {**body, "stream": draw.random() < 0.7}))
        connection.sendall(b"GET /v1/requests?since=0 HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        time.sleep(draw.choice((0.2, 3 * _HOSTILE_PATIENCE_S)))
    return None


def floods_a_head(client: httpx.Client, draw: random.Random) -> int | None:
    """Headers without end, many or one; before the body or, as trailers, behind it."""
    begin = b"GET /health HTTP/1.1\r\n"
    if draw.random() < 0.5:
        begin = _head("/v1/completions", b"transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n"
    piece = b"x" * 60_000 if draw.random() < 0.3 else b"x-y: " + b"z" * 60_000 + b"\r\n"
    return _send(client, (begin, *(piece for _ in range(_FLOOD // len(piece)))))


def floods_chunks(client: httpx.Client, draw: random.Random) -> int | None:
    """A body in chunks: tiny ones, too many, or with invalid sizes and extensions."""
    begin = _head("/v1/completions", b"transfer-encoding: chunked")
    size = draw.choice((b"1", b"1;" + b"e" * 1000, b"1000", b"ffffffffffffffff", b"-1", b"g", b"0x1", b""))
    data = b"{" * (4096 if size == b"1000" else 1)
    piece = size + b"\r\n" + data + b"\r\n"
    return _send(client, (begin, *(piece * 16 for _ in range(min(2000, _FLOOD // (16 * len(piece)))))))


def has_no_key(client: httpx.Client, draw: random.Random) -> int | None:
    """Is refused before it has sent its body, continues for a while, and stays connected."""
    begin = _head("/v1/completions", b"transfer-encoding: chunked", key="")
    with _connect(client) as connection:
        connection.settimeout(_HOSTILE_PATIENCE_S)
        connection.sendall(begin + b"1\r\n{\r\n")
        status = _status(connection.recv(4096))
        try:
            connection.sendall(b"1\r\n{\r\n")
            time.sleep(draw.random() * _HOSTILE_PATIENCE_S)
        except OSError:
            pass
    return status


def sends_noise(client: httpx.Client, draw: random.Random) -> int | None:
    """Bytes that are no HTTP, or a good request with some of its bytes changed."""
    if draw.random() < 0.3:
        return _send(client, (draw.randbytes(draw.randrange(1, 3000)),))
    data = bytearray(_request(draw.choice(_PATHS), {"prompt": "x", "max_tokens": 2}))
    for _ in range(draw.randrange(1, 6)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return _send(client, (bytes(data),))


def sends_bad_json(client: httpx.Client, draw: random.Random) -> int | None:
    """A body that is no JSON, or too deep, or only its beginning."""
    bodies = (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt": "x',
        b"\xff\xfe",
        b"nan",
        b"",
        b'{"n": 1e}',
        b"null",
    )
    data = draw.choice(bodies)
    begin = _head(draw.choice(_PATHS), b"content-length: %d" % len(data))
    return _send(client, (begin, data), wait_s=20.0)


def sends_hostile_fields(client: httpx.Client, draw: random.Random) -> int | None:
    """Fields of the protocol with values that they should not have."""
    body = {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randrange(1, 5))}
    path = draw.choice(_PATHS)
    body = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2, "prompt": "x", **body}
    return _post(client, path, body).status_code


def hangs_up(client: httpx.Client, draw: random.Random) -> int | None:
    """Reads a little of a stream and goes away."""
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": draw.randint(1, 4)}
    with _connect(client) as connection:
        connection.settimeout(20.0)
        connection.sendall(_request("/v1/completions", body))
        status = _status(connection.recv(4096))
        time.sleep(draw.random() * 0.1)
    return status


def uploads_badly(client: httpx.Client, draw: random.Random) -> int | None:
    """A file that stops in its middle, or a bad one that becomes a batch, which is cancelled or fails."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x", "max_tokens": 9},
    }
    data = draw.choice((b"{" * 5000, json.dumps(line).encode() + b"\n", b"\n", b"x" * 300_000))
    form = b"--b\r\ncontent-disposition: form-data; name=purpose\r\n\r\nbatch\r\n--b\r\n"
    form += b"content-disposition: form-data; name=file; filename=a\r\n\r\n" + data + b"\r\n--b--\r\n"
    lines = b"content-type: multipart/form-data; boundary=b\r\ncontent-length: %d" % len(form)
    if draw.random() < 0.5:
        return _send(client, (_head("/v1/files", lines), form[: draw.randrange(len(form))]), wait_s=0.0)
    status = _send(client, (_head("/v1/files", lines), form), wait_s=20.0)
    files = client.get("/v1/files?limit=1", headers=_HEADERS).json()["data"]
    for file in files:
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = _post(client, "/v1/batches", body)
        if answer.status_code == 200 and draw.random() < 0.5:
            answer = client.post(f"/v1/batches/{answer.json()['id']}/cancel", headers=_HEADERS)
        status = answer.status_code
        client.delete(f"/v1/files/{file['id']}", headers=_HEADERS)
    return status


HORRORS: tuple[Horror, ...] = (
    *(stops_somewhere, does_not_read, floods_a_head, floods_chunks, has_no_key, sends_noise),
    *(sends_bad_json, sends_hostile_fields, sends_hostile_fields, hangs_up, uploads_badly),
)


def _connect(client: httpx.Client) -> socket.socket:
    """A connection to a client's server, for bytes of any kind."""
    return socket.create_connection((HOST, client.base_url.port), PATIENCE_S)


def _post(client: httpx.Client, path: str, body: object) -> httpx.Response:
    """The answer to a hostile body; httpx's own JSON leaves out what is not valid."""
    return client.post(path, content=json.dumps(body), headers=_HEADERS)


def _head(path: str, lines: bytes, *, key: str = HOSTILE) -> bytes:
    keys = b"authorization: Bearer " + key.encode() + b"\r\n" if key else b""
    return b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n" + keys + lines + b"\r\n\r\n"


def _request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return _head(path, b"content-length: %d" % len(data)) + data


def _send(
    client: httpx.Client, pieces: Iterable[bytes], *, wait_s: float = _HOSTILE_PATIENCE_S
) -> int | None:
    """Send until the server takes no more, and wait so long for its answer."""
    with _connect(client) as connection:
        connection.settimeout(_HOSTILE_PATIENCE_S)
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            pass  # it has refused the rest, and may have said why
        connection.settimeout(wait_s or 0.001)
        try:
            return _status(connection.recv(4096))
        except OSError:
            return None


def _status(data: bytes) -> int | None:
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else None
