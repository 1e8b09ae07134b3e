"""The kinds of attack that servers of language models were open to, tried over HTTP; none of them works here.

Each test names published cases of its class. The classes are those of `tests/security/test_vulnerability_classes.py`.
"""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.server.bodies import TEXT
from tests.server.conftest import Running
from tests.server.test_clients import raw
from tests.support.bomb import Bomb
from tests.support.tiers import default
from xla_engine import cli
from xla_engine.server.app import make_app
from xla_engine.server.middleware import OPEN_PATHS
from xla_engine.server.service import Service
from xla_engine.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
def post(http: httpx.Client) -> Iterator[Any]:
    """POST to a path; the good request that follows must get the answer that it got before."""

    def good() -> Any:
        return http.post("/v1/completions", json=TEXT).json()["choices"]

    before = good()
    yield lambda path, body: http.post(path, content=json.dumps(body))
    assert good() == before


@pytest.mark.parametrize(
    "kind", ["application/json", "application/octet-stream", "application/python-pickle"]
)
def test_only_json_is_read(http: httpx.Client, kind: str, tmp_path: Path) -> None:
    """A: CVE-2025-32444, CVE-2025-30165, CVE-2026-115912 (pickle on a socket), on every path that takes a body."""
    marker = tmp_path / "exploded"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = http.post(path, content=pickle.dumps(Bomb(marker)), headers={"content-type": kind})
        assert answer.status_code == 400, answer.text
    assert not marker.exists()


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch M') }}",
        "{{ ('{0.__class__}'|attr('format'))(messages) }}",
        "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
    ],
)
def test_a_template_of_a_request_is_refused_or_harmless(post: Any, source: str) -> None:
    """A and D: CVE-2025-61620 (chat_template of a request), CVE-2025-62426, PYSEC-2026-2013 (its arguments)."""
    for fields in ({"chat_template": source}, {"chat_template_kwargs": {"chat_template": source}}):
        answer = post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, **fields})
        assert answer.status_code in (200, 400) and "<class" not in answer.text, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "n": 10**9}),
        ("/v1/completions", {"prompt": "x", "best_of": 10**9}),
        ("/v1/completions", {"prompt": ["x"] * 100_000}),
        ("/v1/completions", {"prompt": ["x"] * 100, "n": 128}),
        ("/v1/completions", {"prompt": "x", "logprobs": 10**9}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 10**9}),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 10**9, "logprobs": True}),
        ("/v1/completions", {"prompt": "x" * 900_000}),
    ],
)
def test_fan_out_is_refused_before_any_work(
    post: Any, server: Running, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B: CVE-2024-8939, CVE-2026-34756, -73559, -114052: nothing is tokenised or opened."""
    calls: list[Any] = []
    submitted = server.service.engine.snapshot().counters.submitted
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", lambda *a, **k: calls.append(a) or [1])
        answer = post(path, body)
    assert answer.status_code == 400, answer.text
    assert not calls and server.service.engine.snapshot().counters.submitted == submitted


@pytest.mark.parametrize(
    "body",
    default(
        [
            {"prompt": ""},
            {"prompt": [10**400]},
            {"prompt": [-1]},
            {"prompt": "\ud800"},
            {"prompt": "x", "logprob_token_ids": [10**9]},
            {"prompt": "x", "logit_bias": {"9" * 5000: 1}},
            {"prompt": "x", "seed": 10**400},
            {"prompt": "x", "temperature": 1e400},
            {"prompt": "x", "stop_token_ids": [2**70]},
            {"prompt": "x", "cache_salt": [1]},
            {"prompt": "x", "repetition_penalty": -1e308},
            {"prompt_embeds": "gAN9cQAu"},
            {"prompt": {"prompt_embeds": [[0.0]]}},
            {"prompt": "x", "kv_transfer_params": {"remote_host": "127.0.0.1"}},
            {
                "prompt": "x",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": -(2**63)}}},
            },
            {"prompt": "x", "structured_outputs": {"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}},
            {"prompt": "x", "structured_outputs": {"json": {"type": "integer", "multipleOf": 2**31}}},
            {"prompt": "x", "structured_outputs": {"regex": "((a{0,9999}){0,9999}){0,9999}"}},
        ],
        6,
    ),
    ids=lambda body: json.dumps(body)[:60],
)
def test_one_body_harms_nobody(post: Any, body: dict[str, Any]) -> None:
    """C, D and E: CVE-2024-8768, CVE-2026-54234, -116180, -105756, PYSEC-2026-4350, CVE-2025-48942, -48943,
    CVE-2026-25048, CVE-2025-62164, -73557: refused, or harmless, and the next good request has its bits."""
    assert post("/v1/completions", {"max_tokens": 4, **body}).status_code in (200, 400)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"type": "object", "properties": {"a": {"pattern": "("}}},
        {"$ref": "#/x"},
        5,
        {"const": -(2**63)},
    ],
)
def test_a_schema_of_a_tool_harms_nobody(post: Any, schema: Any) -> None:
    """D: GHSA-vrq3-r879-7m65 (CVE-2025-48944): type and pattern of a tool's schema ended the server."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": CHAT, "tools": [tool], "tool_choice": choice, "max_tokens": 4}
        assert post("/v1/chat/completions", body).status_code < 500


def test_requests_of_one_id_are_two_requests(http: httpx.Client, server: Running) -> None:
    """C: CVE-2026-105755 (X-Request-Id that collides): the client's id is data, and both get their own answers."""
    bodies = [
        {"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True} for text in ("def a", "x = ")
    ]
    alone = [http.post("/v1/completions", json=body).json()["choices"] for body in bodies]

    def ask(body: dict[str, Any]) -> Any:
        return httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"x-request-id": "same"}, timeout=1800
        )

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, bodies * 4))
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert [answer.json()["choices"] for answer in answers] == alone * 4


def test_an_id_cannot_forge_a_header_or_a_line_of_the_log(server: Running) -> None:
    """C: ids with line ends, and of any length, are replaced."""
    for given in (b"a\tb", b"x" * 200, b"\xff\xfe", b"a b"):
        answer = raw(
            server,
            b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: x\r\nx-request-id: " + given + b"\r\n\r\n",
        )
        assert answer.startswith(b"HTTP/1.1 200") and given not in answer


@pytest.mark.parametrize(
    "part",
    default(
        [
            {"type": "image_url", "image_url": {"url": "URL"}},
            {"type": "input_audio", "input_audio": {"data": "URL", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "URL"}},
            {"type": "file", "file": {"file_id": "URL"}},
        ]
    ),
)
def test_no_address_of_a_request_is_asked(post: Any, part: dict[str, Any]) -> None:
    """G: CVE-2025-6242 (SSRF), CVE-2026-22778 (a video's URL): no connection is made, and nothing is read."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        part = json.loads(json.dumps(part).replace("URL", url))
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        assert post("/v1/chat/completions", body).status_code == 400
        schema = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": {"$ref": url}}}
        assert post("/v1/completions", schema).status_code == 200  # the reference is left to the client
        with pytest.raises(TimeoutError):
            listener.accept()


async def _ask(app: Any, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    """The status of a request with an unnormalised path and raw headers."""
    status: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"x=/health",
        "headers": list(headers),
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "app": app,
    }
    await app(scope, receive, send)
    return status[0]


def test_no_path_and_no_header_goes_past_the_keys(server: Running) -> None:
    """G: CVE-2026-48746 (a crafted Host header went past the keys): every route and method, every form of the path."""
    settings = replace(server.service.settings, api_keys=("alpha",), batch_dir=None)
    app = make_app(Service(server.service.llm, settings))
    hosts = (b"127.0.0.1", b"x/health", b"/health", b"x/health?", b"health", b"x#/health", b"")
    paths = {route.path.replace("{name:path}", "x") for route in app.routes} - OPEN_PATHS  # type: ignore[attr-defined]
    paths |= {
        "//v1/models",
        "/v1/models/",
        "/health/",
        "/health/../v1/models",
        "/health/v1/models",
        "/HEALTH",
        "/health;x",
    }
    paths |= {"/v1/models/../../health", "/%68ealth", "/health\0", "/v1/models?/health", "v1/models", ""}

    async def main() -> set[tuple[str, str, bytes, int]]:
        found = set()
        for path in paths:
            for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "BREW"):
                for host in hosts:
                    headers = ((b"host", host), (b"x-forwarded-prefix", b"/health"))
                    found.add((path, method, host, await _ask(app, method, path, *headers)))
        return found

    found = server.run(main())
    assert len(found) > 500 and {status for *_, status in found} == {401}, [f for f in found if f[3] != 401][
        :5
    ]


def test_every_key_is_compared_in_constant_time(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """G: CVE-2025-59425 (response time revealed the key): all hashes, of equal length, are compared for any input."""
    settings = replace(server.service.settings, api_keys=("alpha", "b", "gamma" * 50), batch_dir=None)
    app = make_app(Service(server.service.llm, settings))
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(
        "xla_engine.server.middleware.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )

    async def main() -> list[int]:
        keys = (b"", b"a", b"alpha", b"alphx", b"x" * 100)
        return [await _ask(app, "GET", "/v1/models", (b"authorization", b"Bearer " + key)) for key in keys]

    assert server.run(main()) == [401, 401, 200, 401, 401]
    assert len(compared) == 5 * 3 and {len(each) for pair in compared for each in pair} == {32}


def test_a_header_of_many_ranges_is_no_work(http: httpx.Client) -> None:
    """G: CVE-2025-62727 (Range headers that cost the square of their length), on the one path that sends files."""
    data = b'{"custom_id": "a"}\n'
    sent = http.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
    assert sent.status_code == 200, sent.text
    path = f"/v1/files/{sent.json()['id']}"
    ranges = "bytes=" + ",".join(f"{n % 5}-{n % 7 + 5}" for n in range(3000))
    done = threading.Event()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(http.get(f"{path}/content", headers={"range": ranges}))
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(600), "it does not come back"
    assert answers[0].status_code in (200, 206, 400, 416) and len(answers[0].content) < 100_000
    assert http.get(f"{path}/content").content == data
    http.delete(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "x\0y", "file-../../x"]
)
def test_a_file_is_found_by_its_id_only(http: httpx.Client, name: str) -> None:
    """G: a path in the place of an id reads nothing outside the folder."""
    path = f"/v1/files/{name}/content".replace("\0", "%00").encode()
    answer = http.get(http.base_url.copy_with(raw_path=path))
    assert answer.status_code in (400, 404) and "root:" not in answer.text


def test_nobody_listens_beyond_this_machine_unless_asked() -> None:
    """G: CVE-2025-30202 (a socket open to all): the address is loopback by default."""
    found = CliRunner().invoke(cli.main, ["serve", "--help"])
    assert "[default: 127.0.0.1]" in " ".join(found.output.split())
