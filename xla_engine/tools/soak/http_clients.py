"""Honest clients of a server: their requests, and the answers that they must get, to the bit."""

import json
import random
import socket
import time
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
