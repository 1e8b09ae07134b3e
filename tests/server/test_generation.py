"""Completions and chats over HTTP: the same bits as a batch line, streamed or whole, alone or among others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.bodies import BODIES, CHAT, TEXT
from tests.server.conftest import Running
from tests.support.tiers import default
from xla_engine.observability.metrics import CACHE_CONFIG, METRICS
from xla_engine.server.info import server_metrics


def post(http: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, whose framing is checked byte by byte."""
    with http.stream("POST", url, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(answer.iter_raw())
    assert raw.endswith(b"\n\n")
    frames = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    assert frames.pop() == b"data: [DONE]"
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that result from joining all chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
            choice["finish_reason"] = piece["finish_reason"]
            for name, value in (piece["logprobs"] or {}).items():
                block = choice["logprobs"] = choice["logprobs"] or {}
                block[name] = block[name] + value if isinstance(value, list) and name in block else value
    return [choices[index] for index in sorted(choices)]


def plain(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_post_gives_the_bits_of_a_batch_line(
    http: httpx.Client, expected: list[dict[str, Any]], number: int
) -> None:
    url, body = BODIES[number]
    answer = post(http, url, body)
    assert answer["choices"] == expected[number]["choices"]
    assert answer["usage"]["completion_tokens"] == expected[number]["usage"]["completion_tokens"]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_streamed_pieces_join_to_the_whole_answer(
    http: httpx.Client, expected: list[dict[str, Any]], number: int
) -> None:
    url, body = BODIES[number]
    assert joined(events(http, url, body)) == plain(expected[number])


@pytest.mark.parametrize("clients", default([8, 64]))
def test_among_other_clients_requests_no_bit_changes(
    http: httpx.Client, expected: list[dict[str, Any]], clients: int
) -> None:
    def ask(number: int) -> bool:
        url, body = BODIES[number % len(BODIES)]
        if number % 2:
            return joined(events(http, url, body)) == plain(expected[number % len(BODIES)])
        return post(http, url, body)["choices"] == expected[number % len(BODIES)]["choices"]

    with ThreadPoolExecutor(clients) as pool:
        assert all(pool.map(ask, range(64)))


def test_the_openai_client_reads_every_form(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="embedded", prompt="def f(", max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length" and whole.usage is not None
    assert whole.usage.completion_tokens == 8
    stream = client.completions.create(
        model="alias",
        prompt="def f(",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
    assert pieces[-1].usage == whole.usage
    chat = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].logprobs is not None and len(chat.choices[0].logprobs.content or ()) == 8
    text = ""
    with client.chat.completions.stream(
        model="embedded", messages=[{"role": "user", "content": "x"}], max_tokens=8, temperature=0
    ) as stream_:
        for event in stream_:
            if event.type == "content.delta":
                text += event.delta
    assert text == chat.choices[0].message.content
    assert {model.id for model in client.models.list()} == {"embedded", "alias"}
    assert client.models.retrieve("alias").id == "alias"


def test_a_chat_without_max_tokens_has_the_rest_of_the_context(http: httpx.Client) -> None:
    body = {"messages": CHAT, "temperature": 0, "ignore_eos": True}
    usage = post(http, "/v1/chat/completions", body)["usage"]
    assert usage["total_tokens"] == 512


def test_token_ids_come_back_where_asked_for(http: httpx.Client) -> None:
    body = {**TEXT, "return_token_ids": True}
    choice = post(http, "/v1/completions", body)["choices"][0]
    assert len(choice["token_ids"]) == 24 and choice["prompt_token_ids"]
    chunks = events(http, "/v1/completions", body)
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[1]", 400, "invalid_json", None),
        (b'{"prompt": "x", "prompt": "y"}', 400, "invalid_json", None),
        ({}, 400, "invalid_request", None),
        ({"prompt": ""}, 400, "invalid_request", "prompt"),
        ({"prompt": "x", "model": "gpt-7"}, 404, "model_not_found", "model"),
        ({"prompt": "x", "max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, 400, "invalid_request", "logprobs"),
        ({"prompt": "x", "suffix": "y"}, 400, "invalid_request", "suffix"),
        ({"prompt": "x", "frobnicate": 1}, 400, "invalid_request", "frobnicate"),
        ({"prompt": "x", "max_tokens": 5000}, 400, "context_length_exceeded", None),
        ({"prompt": [5, 99999]}, 400, "invalid_request", None),
        ({"prompt": "x", "stream": 1}, 400, "invalid_request", "stream"),
        ({"prompt": "x", "stream_options": {}}, 400, "invalid_request", "stream_options"),
        ({"prompt": "x", "n": 129}, 400, "invalid_request", "n"),
        ({"prompt": "x", "n": 100}, 400, "invalid_request", "n"),
        ({"prompt": "x", "priority": 99}, 400, "invalid_request", "priority"),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "invalid_request", None),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(
    http: httpx.Client, body: Any, status: int, code: str, param: str | None
) -> None:
    answer = http.post("/v1/completions", content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and error["message"]
    assert param is None or error["param"] == param


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="embedded", prompt="x", max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_request_out_of_time_is_told_so(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "1"})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
    raw = http.post(
        "/v1/completions", json={**body, "stream": True}, headers={"x-request-timeout-ms": "1"}
    ).text
    assert '"code":"deadline"' in raw and raw.endswith("data: [DONE]\n\n")


def test_small_paths(http: httpx.Client, server: Running) -> None:
    for path in ("/health", "/ready", "/ping", "/version", "/v1/models"):
        assert http.get(path).status_code == 200
    assert http.get("/health").json() == {"status": "ok", "last_step_age_s": 0.0}
    ids = http.post("/tokenize", json={"prompt": "def f(x):\n    return x", "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"]) and ids["max_model_len"] == 512
    assert (
        http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == "def f(x):\n    return x"
    )
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["count"] > 3
    assert http.get("/tokenizer_info").json()["vocab_size"] == 4096
    assert http.post("/tokenize", json={"prompt": 3}).status_code == 400
    for wrong in (-1, 1.5, True, "1", None, 2**31):
        assert http.post("/detokenize", json={"tokens": [wrong]}).status_code == 400
    by_value = http.post("/detokenize", json={"tokens": [float(token) for token in ids["tokens"]]})
    assert by_value.json()["prompt"] == "def f(x):\n    return x"
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    refused = http.get("/v1/completions")
    assert refused.status_code == 405 and "this path takes POST, not GET" in refused.text
    requests = http.get("/v1/requests").json()
    assert len(requests["slots"]) == 8 and requests["num_waiting"] == 0


def test_a_request_id_comes_back_if_it_is_one(http: httpx.Client) -> None:
    good = http.get("/health", headers={"x-request-id": "abc-1.2"})
    assert good.headers["x-request-id"] == "abc-1.2"
    bad = http.get("/health", headers={"x-request-id": "a b" * 100})
    assert bad.headers["x-request-id"] != "a b" * 100


def test_metrics_bear_vllms_names(http: httpx.Client, server: Running) -> None:
    post(http, "/v1/completions", TEXT)
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:cache_config_info",
    ):
        assert families[name].samples, name
    assert set(families) == {
        name.removesuffix("_total")
        for name in (*(each.name for each in (*METRICS, *server_metrics(server.service))), CACHE_CONFIG)
    }
    whole = [s for s in families["vllm:e2e_request_latency_seconds"].samples if s.name.endswith("_count")]
    assert whole[0].value >= 1
