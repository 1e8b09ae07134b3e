"""Requests with large answers: refused by their fields if too large, otherwise sent in small parts."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tests.server.test_clients import Client
from xla_engine.openai.logprobs import TextLogprobs
from xla_engine.server.completions import completions
from xla_engine.server.errors import ApiError
from xla_engine.server.service import Service
from xla_engine.server.turns import PART_BYTES
from xla_engine.text.tokenizer import Tokenizer

ECHO = {"prompt": [[7] * 480], "n": 8, "max_tokens": 1, "echo": True, "logprobs": 20, "temperature": 1}


def answered(server: Running, body: dict[str, Any]) -> list[bytes]:
    """The parts in which a client receives its answer."""

    async def main() -> list[bytes]:
        client = Client(body)
        await completions(server.service, "/v1/completions")(client.scope, client.receive, client.send)
        return [message.get("body", b"") for message in client.sent]

    found: list[bytes] = server.run(main())
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 20},
        {"n": 8, "echo": False, "max_tokens": 300, "logprobs": 4},
        {"prompt": ["f(x) = " * 50] * 8},
    ],
)
def test_an_answer_that_may_be_too_large_is_refused_before_it_is_begun(
    server: Running, change: dict[str, Any], stream: bool
) -> None:
    """The limit in this test is that of one sequence: 21 values for each of 512 tokens."""
    engine = server.service.engine

    async def main() -> None:
        service = Service(server.service.llm, replace(server.service.settings, max_answer_values=1))
        client = Client({**ECHO, "stream": stream, **change})
        submitted = engine.snapshot().counters.submitted
        with pytest.raises(ApiError) as refused:
            await completions(service, "/v1/completions")(client.scope, client.receive, client.send)
        assert refused.value.status == 400 and refused.value.param == "logprobs"
        for word in ("n x", "max_tokens", "echo", "logprobs", "--max-answer-values"):
            assert word in refused.value.message
        assert engine.snapshot().counters.submitted == submitted
        assert service.values == service.live == 0
        one = Client({**ECHO, "n": 1, "temperature": 0})
        await completions(service, "/v1/completions")(one.scope, one.receive, one.send)
        assert one.sent[0]["status"] == 200, "one sequence is always allowed"

    server.run(main())


def test_what_answers_under_way_may_hold_is_bounded(server: Running) -> None:
    """When many allowed requests come at once, some get 429 and the others their answers; nothing stays counted."""

    async def main() -> None:
        service = Service(server.service.llm, replace(server.service.settings, max_answer_values=1))
        endpoint, most = completions(service, "/v1/completions"), 0

        async def ask() -> int:
            nonlocal most
            client = Client(
                {"prompt": [7], "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "temperature": 0}
            )
            try:
                await endpoint(client.scope, client.receive, client.send)
            except ApiError as error:
                return error.status
            finally:
                most = max(most, service.values)
            return int(client.sent[0]["status"])

        found = await asyncio.gather(*(ask() for _ in range(20)))
        assert set(found) == {200, 429} and most <= 2 * 21 * 512
        assert service.values == 0

    server.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_made_and_sent_in_small_parts(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request of 100 bytes gets 2 MB. They are sent in small parts; what all choices repeat is built once."""
    positions: list[int] = []
    prompt = TextLogprobs.prompt
    monkeypatch.setattr(
        TextLogprobs,
        "prompt",
        lambda self, output, part: (
            positions.extend(range(len(output.prompt_token_ids))[part]) or prompt(self, output, part)
        ),
    )
    parts = answered(server, {**ECHO, "stream": stream})
    assert positions == list(range(480))
    assert sum(map(len, parts)) > 2_000_000
    assert max(map(len, parts)) < 2 * PART_BYTES
    if not stream:
        choices = json.loads(b"".join(parts))["choices"]
        assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [481] * 8


def test_tokens_are_spelled_once_each_and_in_parts(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.service.engine.tokenizer
    assert tokenizer is not None
    decoded: list[int] = []
    decode = Tokenizer.decode
    monkeypatch.setattr(tokenizer, "_strings", {})
    monkeypatch.setattr(
        Tokenizer,
        "decode",
        lambda self, ids, **options: decoded.append(len(ids)) or decode(self, ids, **options),
    )
    text = "def f(x): return x + 1\n" * 10_000
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == text and len(answer["tokens"]) == answer["count"]
    assert len(decoded) == len(set(answer["tokens"])), "a token is decoded whenever it comes"
    decoded.clear()
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert back == text and not decoded, "all is decoded in one piece"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
def test_a_chat_of_too_many_messages_is_refused(
    server: Running, http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(server.service.rendering, "_render", lambda *a, **k: calls.append(a) or "x")
    messages = [{"role": "user", "content": "x"}] * 9000
    answer = http.post(path, json={"input" if path.endswith("responses") else "messages": messages})
    assert answer.status_code == 400 and "8192 are allowed" in answer.json()["error"]["message"]
    assert not calls


@pytest.mark.full
def test_a_chat_does_not_wait_for_the_large_chats_of_others(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large chats of one key never finish rendering; another key's small one is answered."""
    service, may = server.service, threading.Event()
    large = {"messages": [{"role": "user", "content": "x" * 90}] * 5000, "max_tokens": 1}
    render = service.engine.render_chat

    def slow(messages: Any, **options: Any) -> str:
        assert len(messages) == 1 or may.wait(600)
        return render(messages, **options)

    monkeypatch.setattr(service.rendering, "_render", slow)

    async def ask(key: str, body: dict[str, Any]) -> int:
        client = Client(body)
        client.scope["state"] = {"tenant": key}
        try:
            await completions(service, "/v1/chat/completions")(client.scope, client.receive, client.send)
        except ApiError as error:
            return error.status
        return int(client.sent[0]["status"])

    async def main() -> None:
        many = [asyncio.create_task(ask("a", large)) for _ in range(40)]
        while service.rendering.shares.held < 3 << 20:
            await asyncio.sleep(0)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert await asyncio.wait_for(ask("b", body), 300) == 200
        assert not all(task.done() for task in many)
        may.set()
        statuses = await asyncio.gather(*many)
        assert statuses.count(429) > 10 and statuses.count(400) > 10, (
            "the prompts are too long, or too many wait"
        )
        assert service.rendering.shares.held == 0

    server.run(main())
