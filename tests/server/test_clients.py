"""Clients that disconnect, read slowly, send too much or too little, or have no key; none of them affects another."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tests.support.again import again
from xla_engine.observability.observer import Observer
from xla_engine.server.app import make_app
from xla_engine.server.completions import completions
from xla_engine.server.service import Service
from xla_engine.server.settings import read_api_keys

LONG = {"prompt": "def f(", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


class Client:
    """An ASGI client that disconnects on command."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.scope = {"type": "http", "headers": [], "state": {}, "path": "/v1/completions", "method": "POST"}

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_slot_within_two_steps(server: Running, stream: bool) -> None:
    """For each of fifty clients, some of which still wait for a slot."""
    service = server.service

    async def main() -> list[int]:
        endpoint = completions(service, "/v1/completions")
        clients = [Client({**LONG, "stream": stream}) for _ in range(50)]
        tasks = [asyncio.create_task(endpoint(c.scope, c.receive, c.send)) for c in clients]
        turned = asyncio.Event()
        service.engine.observers.add(observer := Observer(started=lambda _: turned.set()))
        try:
            while service.engine.num_running < service.engine.max_num_seqs:
                turned.clear()
                await turned.wait()
            assert service.live == 50
            before = service.engine.snapshot().counters.steps_planned
            for client in clients:
                client.gone.set()
            await asyncio.gather(*tasks)
            steps = service.engine.snapshot().counters.steps_planned - before
            assert service.live == 0
            assert all(slot.request is None for slot in service.engine.snapshot().slots)
            return [steps]
        finally:
            service.engine.observers.remove(observer)

    (steps,) = server.run(main())
    assert steps <= 2


@pytest.mark.parametrize("stream", [False, True])
@again
def test_a_socket_that_is_closed_ends_its_request(server: Running, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for one in sockets:
        one.sendall(head + body)
    server.wait_until(lambda: server.service.live > 0, 5)
    for one in sockets:
        one.close()
    server.wait_until(lambda: server.service.live == 0)
    aborted = server.service.engine.stats().finished["abort"]
    assert aborted > 0


@pytest.mark.full
@again
def test_a_reader_that_takes_nothing_is_cut_off_and_holds_up_nobody(
    server: Running, http: httpx.Client
) -> None:
    """Its socket fills up after some chunks; the other clients continue, and it is aborted after `send_timeout_s`."""
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 24, "temperature": 1}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        server.wait_until(lambda: server.service.live == 24, 5)
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        assert answer.status_code == 200
        server.wait_until(lambda: server.service.live == 0)
        place = slow.getsockname()[1]
        connections = server.server.server_state.connections
        server.wait_until(lambda: place not in [each.client[1] for each in list(connections) if each.client])


@again
def test_a_full_queue_says_when_to_come_again(server: Running, http: httpx.Client) -> None:
    service = server.service
    server.wait_until(lambda: service.live == 0)

    async def main() -> None:
        endpoint = completions(service, "/v1/completions")
        clients = [Client(LONG) for _ in range(service.engine.max_num_seqs + service.settings.max_waiting)]
        tasks = [asyncio.create_task(endpoint(c.scope, c.receive, c.send)) for c in clients]
        while service.live < len(clients):
            await asyncio.sleep(0)
        answer = await asyncio.to_thread(http.post, "/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await asyncio.to_thread(http.get, "/health")).status_code == 200
        for client in clients:
            client.gone.set()
        await asyncio.gather(*tasks)

    server.run(main())
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def raw(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=1800) as one:
        one.sendall(data)
        answer = b""
        try:
            while part := one.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def test_a_body_beyond_the_limit_is_refused_unread(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    answer = raw(server, head + b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    try:
        answer = raw(server, chunked + 40 * part)
    except (BrokenPipeError, ConnectionResetError):
        return  # it hung up on us, which is as good
    assert not answer or answer.startswith(b"HTTP/1.1 413")


def test_headers_beyond_the_limit_are_refused(server: Running) -> None:
    many = b"".join(b"x-h%d: %s\r\n" % (number, b"y" * 1000) for number in range(200))
    assert raw(server, b"GET /health HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431")
    assert raw(server, b"GET /health HTTP/1.1\r\nx: " + b"y" * 300_000).startswith(b"HTTP/1.1 431")


@pytest.mark.full
def test_a_slow_head_and_a_slow_body_run_out_of_time(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(raw, [server] * 2, [b"GET /health HTTP/1.1\r\n", head + b"{"])
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)


def test_bytes_that_are_no_http_are_refused(server: Running, http: httpx.Client) -> None:
    assert raw(server, b"\x00\x01\x02\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200


def test_keys_open_every_path_but_the_probes(server: Running) -> None:
    settings = replace(server.service.settings, api_keys=("alpha", "beta"), batch_dir=None)
    app = make_app(Service(server.service.llm, settings))

    async def ask(path: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            return (await client.get(path, headers=headers)).status_code

    async def main() -> None:
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert await ask(path) == 200
        for path in ("/v1/models", "/v1/requests", "/tokenizer_info", "/nothing"):
            assert await ask(path) == 401
            assert await ask(path, authorization="Bearer gamma") == 401
            assert await ask(path, authorization="Basic alpha") == 401
        for key in ("alpha", "beta"):
            assert await ask("/v1/models", authorization=f"Bearer {key}") == 200

    server.run(main())


def test_a_key_finds_no_prefix_that_another_has_cached(server: Running) -> None:
    """Otherwise the time to first token would reveal others' prompts. A key finds its own prefixes."""
    settings = replace(server.service.settings, api_keys=("alpha", "beta"), batch_dir=None)
    app = make_app(Service(server.service.llm, settings))
    body = {"prompt": [5, 6, 7, 8] * 50, "max_tokens": 1}

    async def cached(key: str) -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"authorization": f"Bearer {key}"}
            answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def main() -> list[int]:
        return [await cached(key) for key in ("alpha", "alpha", "beta", "beta")]

    first, again, other, others_own = server.run(main())
    assert first == other == 0 and again == others_own > 0


def test_a_key_file_has_a_key_a_line(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta \n")
    assert read_api_keys(file) == ("alpha", "beta")
    file.write_text("#\n")
    with pytest.raises(ValueError, match="contains no key"):
        read_api_keys(file)
