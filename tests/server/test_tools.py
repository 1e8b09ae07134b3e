"""Tools and reasoning over HTTP: forced calls by grammar, free ones by the parsers, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.bodies import TOOL
from tests.server.conftest import Running
from xla_engine.text.parsers.choose import Dialect

MESSAGES: Any = [{"role": "user", "content": "add"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_parses_and_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(3):
        options: Any = {"model": "embedded", "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
        options |= {"seed": seed, "max_tokens": 60}
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        found = json.loads(call.function.arguments)  # type: ignore[union-attr]
        assert call.function.name == "add" and set(found) == {"a", "b"} and found["a"] in (1, 2)  # type: ignore[union-attr]
        name, arguments, reasons = "", "", []
        for chunk in client.chat.completions.create(**options, stream=True):
            reasons.append(chunk.choices[0].finish_reason)
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert piece.index == 0 and piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)  # type: ignore[union-attr]
        assert reasons[-1] == "tool_calls"


@pytest.mark.parametrize("tools", [1, 2])
def test_a_schema_may_refer_to_its_own_definitions(client: openai.OpenAI, tools: int) -> None:
    """The grammar of a forced call holds the schemas of all tools; each keeps its `#/$defs`."""
    for_ref = {
        "$defs": {"Side": {"enum": [3, 4]}},
        "properties": {"a": {"$ref": "#/$defs/Side"}},
        "required": ["a"],
    }
    schema = {"type": "object", "additionalProperties": False, **for_ref}
    given: Any = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}
        for number in range(tools)
    ]
    options: Any = {"model": "embedded", "messages": MESSAGES, "seed": 1, "max_tokens": 60}
    answer = client.chat.completions.create(**options, tools=given, tool_choice="required").choices[0]
    (call,) = answer.message.tool_calls or ()
    assert json.loads(call.function.arguments) in ({"a": 3}, {"a": 4})  # type: ignore[union-attr]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, **fields})


def test_tools_that_cannot_be_are_refused(http: httpx.Client) -> None:
    for fields in (
        {"tools": [TOOL]},  # the template tells of no format of calls
        {"tools": [TOOL, TOOL], "tool_choice": "required"},
        {"tools": [{"type": "function"}], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": 3},
    ):
        answer = chat(http, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in ("tools", "tool_choice")
    assert chat(http, tools=[TOOL], tool_choice="none").status_code == 200
    assert chat(http, tool_choice="auto", parallel_tool_calls=True, reasoning_effort="low").status_code == 200


def test_calls_and_reasoning_in_a_text_are_told_apart(server: Running, http: httpx.Client) -> None:
    """The model is held to a text by a grammar, so that there is something to parse."""
    call = '{"name": "add", "arguments": {"a": 1}}'
    text = f"<think>so</think>I add.<tool_call>{call}</tool_call>"
    fields: Any = {"tools": [TOOL], "max_tokens": 100, "structured_outputs": {"choice": [text]}}
    before = server.service.dialect
    server.service.dialect = Dialect(tools="hermes", reasoning="think")
    try:
        message = chat(http, **fields).json()["choices"][0]
        assert message["message"]["content"] == "I add."
        assert message["message"]["reasoning_content"] == "so"
        assert message["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert message["finish_reason"] == "tool_calls"
        streamed: dict[str, str] = {}
        calls: list[Any] = []
        with http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": MESSAGES, "stream": True, "logprobs": True, **fields},
        ) as answer:
            tokens = 0
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += len((choice["logprobs"] or {"content": []})["content"])
                    for name, value in choice["delta"].items():
                        if name == "tool_calls":
                            calls += value
                        elif name != "role":
                            streamed[name] = streamed.get(name, "") + value
        assert (streamed["content"], streamed["reasoning"]) == ("I add.", "so")
        assert "".join(each["function"]["arguments"] for each in calls) == '{"a": 1}'
        assert tokens == len(chat(http, **fields, logprobs=True).json()["choices"][0]["logprobs"]["content"])
    finally:
        server.service.dialect = before
