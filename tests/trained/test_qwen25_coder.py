"""A trained model of code behind the server: agents' sessions over every front door, and gaps between texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tests.trained import qwen25_coder
from tests.trained.runs import opened
from xla_engine.async_llm import AsyncLLM
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(qwen25_coder.IS_MISSING, reason=f"needs trained weights: {qwen25_coder.INSTALL}"),
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = "What is the weather in Rome?"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = qwen25_coder.joined(tmp_path_factory.mktemp("qwen"))
    engine = opened(file, quantization="gguf-int8", max_num_seqs=4, max_model_len=1024)
    file.unlink()
    server = Running(Service(AsyncLLM.from_engine(engine), ServerSettings(model_names=("coder",))))
    try:
        with httpx.Client(base_url=server.url, timeout=1800) as client:
            yield client
    finally:
        server.stop()


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_developers_message_is_the_systems(http: httpx.Client) -> None:
    counts = [
        post(
            http,
            "/tokenize",
            messages=[{"role": role, "content": "Be short."}, {"role": "user", "content": "hello"}],
        )
        for role in ("developer", "system")
    ]
    assert counts[0] == counts[1]
    asked: list[Any] = [
        [{"role": role, "content": "Say only yes."}, {"role": "user", "content": "Ok?"}]
        for role in ("developer", "system")
    ]
    answers = [post(http, "/v1/responses", input=each, max_output_tokens=8)["output"] for each in asked]
    assert answers[0][0]["content"] == answers[1][0]["content"]
    unknown = http.post("/v1/chat/completions", json={"messages": [{"role": "wizard", "content": "x"}]})
    assert unknown.status_code == 400 and "messages[0]" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("most", [3, 8, 40])
def test_a_session_goes_on_after_a_call_that_a_limit_cut_off(http: httpx.Client, most: int) -> None:
    """Over each front door: the forced call and its result go back, and the model answers."""
    tool = {"name": "get_weather", "description": "The weather of a city", "parameters": CITY}
    tools = [{"type": "function", "function": tool}]
    messages: list[Any] = [{"role": "user", "content": ASK}]
    chat = post(
        http, "/v1/chat/completions", messages=messages, tools=tools, tool_choice="required", max_tokens=most
    )
    message = chat["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
        for call in message.get("tool_calls") or ()
    ]
    again = post(http, "/v1/chat/completions", messages=[*messages, message, *results], max_tokens=20)
    assert again["choices"][0]["message"]["content"]

    flat = [{"type": "function", **tool}, {"type": "web_search"}]
    asked = {"tools": flat, "tool_choice": "required", "max_output_tokens": most}
    output = post(http, "/v1/responses", input=messages, **asked)["output"]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny, 21 degrees"}
        for item in output
        if item["type"] == "function_call"
    ]
    told = post(http, "/v1/responses", input=[*messages, *output, *outputs], max_output_tokens=20)
    assert told["output"][0]["content"][0]["text"] == again["choices"][0]["message"]["content"]

    other = [{"name": tool["name"], "description": tool["description"], "input_schema": CITY}]
    first = post(
        http, "/v1/messages", messages=messages, tools=other, tool_choice={"type": "any"}, max_tokens=most
    )
    blocks: list[Any] = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny, 21 degrees"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    back = [
        *messages,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": blocks or "?"},
    ]
    last = post(http, "/v1/messages", messages=back, max_tokens=20)
    assert last["content"][0]["text"]
    if most == 40:  # a whole call, which is the same in each form
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == first["content"][0]["input"]
        assert last["content"][0]["text"] == again["choices"][0]["message"]["content"]


def test_a_gap_is_filled(http: httpx.Client) -> None:
    before, after = 'def add(a, b):\n    """Adds two numbers."""\n    return ', "\n\nassert add(1, 2) == 3\n"
    answer = post(http, "/v1/completions", prompt=before, suffix=after, max_tokens=60)
    assert answer["choices"][0]["text"].split()[:3] == ["a", "+", "b"]


@pytest.mark.parametrize("strict", [False, True])
def test_bare_json_is_a_call_by_default(http: httpx.Client, strict: bool) -> None:
    """The model writes JSON without the tags of its template; whole and streamed, the server returns a call."""
    tool = {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": CITY,
        "strict": strict,
    }
    asked: Any = {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. Use the tools."},
            {"role": "user", "content": "What is the weather in Paris? Call get_weather."},
        ],
        "tools": [{"type": "function", "function": tool}],
        "max_tokens": 60,
    }
    choice = post(http, "/v1/chat/completions", **asked)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    stream = http.post("/v1/chat/completions", json={"temperature": 0, "stream": True, **asked}).text
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line[:7] == "data: {"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert not any(delta.get("content") for delta in deltas)
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
