"""Clients of a server.

Honest ones: their requests, and the answers that they must get, to the bit.

Hostile ones, which stop, flood, do not read, or send invalid data: each is a function of an address and a random
generator that returns the status of the server's answer, None if there was none. A 5xx is never right.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

HOST = "127.0.0.1"
HONEST, HOSTILE = "honest", "hostile"  # keys
PATIENCE_S = 60.0  # for an answer: a client that gets none in this time is locked out
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"

Body = tuple[str, dict[str, Any]]  # path and body
Choices = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens on this machine."""

    port: int

    def open(self) -> socket.socket:
        """A connection, for whoever writes bytes. Raises OSError."""
        return socket.create_connection((HOST, self.port), PATIENCE_S)

    def ask(
        self, path: str, body: object = None, *, method: str | None = None, key: str = HONEST
    ) -> tuple[int, bytes]:
        """Status and content of a whole answer. Raises OSError and HTTPException."""
        connection = HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """A JSON answer. Raises RuntimeError for a status other than 200."""
        status, data = self.ask(path)
        if status != 200:
            raise RuntimeError(f"GET {path} is answered {status}: {data[:200]!r}")
        return json.loads(data)


def draw_bodies(draw: random.Random, count: int) -> list[Body]:
    """Requests that have the same answer every time."""
    return [_body(draw) for _ in range(count)]


def _body(draw: random.Random) -> Body:
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 32), "seed": draw.randrange(1000)}
    fields["temperature"] = draw.choice((0, 0.7, 1.0))
    if fields["temperature"] and draw.random() < 0.3:
        fields["n"] = 2
    if draw.random() < 0.2:
        fields["stop"] = draw.choice(("\n", " ", "self"))
    if draw.random() < 0.3:
        fields["top_p"] = draw.choice((0.5, 0.9))
    if draw.random() < 0.2:
        fields["ignore_eos"] = True
    text = "".join(draw.choice("def add(a, b):\n    return x = 1") for _ in range(draw.randint(1, 40)))
    if draw.random() < 0.3:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {
            "messages": messages,
            "logprobs": True,
            "top_logprobs": draw.randrange(3),
            **fields,
        }
    fields["echo"] = draw.random() < 0.2
    return "/v1/completions", {"prompt": text, "logprobs": draw.randrange(3), **fields}


def answer_of(address: Address, body: Body, *, stream: bool) -> Choices:
    """What a server answers, whole or streamed, in one form. Raises RuntimeError for what is no result, OSError and
    HTTPException."""
    path, fields = body
    status, data = 429, b""
    until = time.monotonic() + PATIENCE_S
    while status == 429 and time.monotonic() < until:  # a full queue is no error
        status, data = address.ask(path, {**fields, "stream": stream})
    if status != 200:
        raise RuntimeError(f"{path} is answered {status}: {data[:200]!r}")
    return _joined(data) if stream else [_whole(choice) for choice in json.loads(data)["choices"]]


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    lists = {name: values for name, values in (choice["logprobs"] or {}).items() if values}
    return {"text": text, "finish_reason": choice["finish_reason"], **lists}


def _joined(data: bytes) -> Choices:
    found: dict[int, dict[str, Any]] = {}
    *events, last = (part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part)
    if last != b"[DONE]":
        raise RuntimeError("a stream ends without [DONE]")
    for event in map(json.loads, events):
        if "error" in event:
            raise RuntimeError(f"a stream has an error: {event['error']}")
        for piece in event["choices"]:
            choice = found.setdefault(piece["index"], {"text": "", "finish_reason": None})
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content") or ""
            choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                if values:
                    choice.setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


Horror = Callable[[Address, random.Random], int | None]

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
_FIELDS = (
    *(
        "prompt",
        "messages",
        "input",
        "model",
        "n",
        "best_of",
        "stream",
        "logprobs",
        "top_logprobs",
        "stop",
        "echo",
    ),
    *("max_tokens", "temperature", "top_p", "seed", "tools", "tool_choice", "response_format", "logit_bias"),
    *(
        "tokens",
        "priority",
        "deadline_s",
        "cache_salt",
        "text",
        "reasoning",
        "metadata",
        "user",
        "instructions",
    ),
    *(
        "input_file_id",
        "endpoint",
        "completion_window",
        "structured_outputs",
        "chat_template_kwargs",
        "store",
    ),
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


def stops_somewhere(address: Address, draw: random.Random) -> int | None:
    """Sends the beginning of a good request, in pieces, and goes away or is silent."""
    data = _request("/v1/completions", {"prompt": "x", "max_tokens": 8, "stream": draw.random() < 0.5})
    cut = draw.randrange(len(data))
    first = draw.randrange(cut + 1)
    return _send(address, (data[:first], data[first:cut]), wait_s=draw.choice((0.0, _HOSTILE_PATIENCE_S)))


def does_not_read(address: Address, draw: random.Random) -> int | None:
    """Requests a large answer, reads none of it, and stays connected for a while."""
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "n": 4, "logprobs": 5, "echo": True}
    with address.open() as connection:
        connection.sendall(_request("/v1/completions", {**body, "stream": draw.random() < 0.7}))
        connection.sendall(b"GET /v1/requests?since=0 HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        time.sleep(draw.choice((0.2, 3 * _HOSTILE_PATIENCE_S)))
    return None


def floods_a_head(address: Address, draw: random.Random) -> int | None:
    """Headers without end, many or one; before the body or, as trailers, behind it."""
    begin = b"GET /health HTTP/1.1\r\n"
    if draw.random() < 0.5:
        begin = _head("/v1/completions", b"transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n"
    piece = b"x" * 60_000 if draw.random() < 0.3 else b"x-y: " + b"z" * 60_000 + b"\r\n"
    return _send(address, (begin, *(piece for _ in range(_FLOOD // len(piece)))))


def floods_chunks(address: Address, draw: random.Random) -> int | None:
    """A body in chunks: tiny ones, too many, or with invalid sizes and extensions."""
    begin = _head("/v1/completions", b"transfer-encoding: chunked")
    size = draw.choice((b"1", b"1;" + b"e" * 1000, b"1000", b"ffffffffffffffff", b"-1", b"g", b"0x1", b""))
    data = b"{" * (4096 if size == b"1000" else 1)
    piece = size + b"\r\n" + data + b"\r\n"
    return _send(address, (begin, *(piece * 16 for _ in range(min(2000, _FLOOD // (16 * len(piece)))))))


def has_no_key(address: Address, draw: random.Random) -> int | None:
    """Is refused before it has sent its body, continues for a while, and stays connected."""
    begin = _head("/v1/completions", b"transfer-encoding: chunked", key="")
    with address.open() as connection:
        connection.settimeout(_HOSTILE_PATIENCE_S)
        connection.sendall(begin + b"1\r\n{\r\n")
        status = _status(connection.recv(4096))
        try:
            connection.sendall(b"1\r\n{\r\n")
            time.sleep(draw.random() * _HOSTILE_PATIENCE_S)
        except OSError:
            pass
    return status


def sends_noise(address: Address, draw: random.Random) -> int | None:
    """Bytes that are no HTTP, or a good request with some of its bytes changed."""
    if draw.random() < 0.3:
        return _send(address, (draw.randbytes(draw.randrange(1, 3000)),))
    data = bytearray(_request(draw.choice(_PATHS), {"prompt": "x", "max_tokens": 2}))
    for _ in range(draw.randrange(1, 6)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return _send(address, (bytes(data),))


def sends_bad_json(address: Address, draw: random.Random) -> int | None:
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
    return _send(address, (begin, data), wait_s=20.0)


def sends_hostile_fields(address: Address, draw: random.Random) -> int | None:
    """Fields of the protocol with values that they should not have."""
    body = {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randrange(1, 5))}
    path = draw.choice(_PATHS)
    body = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2, "prompt": "x", **body}
    return address.ask(path, body, key=HOSTILE)[0]


def hangs_up(address: Address, draw: random.Random) -> int | None:
    """Reads a little of a stream and goes away."""
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": draw.randint(1, 4)}
    with address.open() as connection:
        connection.settimeout(20.0)
        connection.sendall(_request("/v1/completions", body))
        status = _status(connection.recv(4096))
        time.sleep(draw.random() * 0.1)
    return status


def uploads_badly(address: Address, draw: random.Random) -> int | None:
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
        return _send(address, (_head("/v1/files", lines), form[: draw.randrange(len(form))]), wait_s=0.0)
    status = _send(address, (_head("/v1/files", lines), form), wait_s=20.0)
    files = json.loads(address.ask("/v1/files?limit=1", key=HOSTILE)[1])["data"]
    for file in files:
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        status, answer = address.ask("/v1/batches", body, key=HOSTILE)
        if status == 200 and draw.random() < 0.5:
            path = f"/v1/batches/{json.loads(answer)['id']}/cancel"
            status, _ = address.ask(path, method="POST", key=HOSTILE)
        address.ask(f"/v1/files/{file['id']}", method="DELETE", key=HOSTILE)
    return status


HORRORS: tuple[Horror, ...] = (
    *(stops_somewhere, does_not_read, floods_a_head, floods_chunks, has_no_key, sends_noise),
    *(sends_bad_json, sends_hostile_fields, sends_hostile_fields, hangs_up, uploads_badly),
)


def _head(path: str, lines: bytes, *, key: str = HOSTILE) -> bytes:
    keys = b"authorization: Bearer " + key.encode() + b"\r\n" if key else b""
    return b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n" + keys + lines + b"\r\n\r\n"


def _request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return _head(path, b"content-length: %d" % len(data)) + data


def _send(address: Address, pieces: Iterable[bytes], *, wait_s: float = _HOSTILE_PATIENCE_S) -> int | None:
    """Send until the server takes no more, and wait so long for its answer."""
    with address.open() as connection:
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
