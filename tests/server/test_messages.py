"""Anthropic's Messages API: the same answers as chats, in its own form; and its client, where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.bodies import TEMPLATE, TOOL
from tests.server.conftest import Running
from tests.server.test_tools import read
from xla_engine.openai.chat_message import read_message
from xla_engine.server.app import make_app
from xla_engine.server.errors import ApiError
from xla_engine.server.messages import MessageBuilder
from xla_engine.server.messages_body import chat_of
from xla_engine.server.service import Service
from xla_engine.text.chat_template import render_chat
from xla_engine.text.conversation import normalised

ASK: Any = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "max_tokens": 12,
}
ASK |= {"temperature": 0}
FUNCTION: Any = {"name": "add", "description": "adds", "input_schema": TOOL["function"]["parameters"]}
PNG = "iVBORw0KGgo="


def post(http: httpx.Client, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return http.post(path, json={**ASK, **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds of a stream's events."""
    message, texts = dict(events[0]["message"]), dict[int, str]()
    for event in events[1:]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"] = [*message["content"], dict(block)]
                texts[index] = ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                kind = message["content"][index]["type"]
                name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[kind]
                assert delta["type"] == {"tool_use": "input_json_delta"}.get(kind, f"{kind}_delta")
                texts[index] += delta[name]
            case {"type": "content_block_stop", "index": index}:
                block = message["content"][index]
                if block["type"] != "tool_use":
                    block[block["type"]] = texts[index]
                elif texts[index]:
                    try:
                        block["input"] = json.loads(texts[index])
                    except ValueError:
                        block["input"] = {"arguments": texts[index]}
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
            case {"type": kind}:
                assert kind == "message_stop" and event is events[-1]
    return message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [FUNCTION], "tool_choice": {"type": "any"}, "max_tokens": 60},
        {"tools": [FUNCTION], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 3},
        {"stop_sequences": ["Al"], "max_tokens": 60},
    ],
)
def test_an_answer_is_that_of_a_chat_streamed_and_whole(http: httpx.Client, options: Any) -> None:
    whole = post(http, **options).json()
    assert whole["type"] == "message" and whole["role"] == "assistant" and whole["id"].startswith("msg_")
    streamed = built(events_of(post(http, **options, stream=True).text))
    new = ("id", "content", "usage")
    assert {name: whole[name] for name in whole if name not in new} == {
        name: streamed[name] for name in whole if name not in new
    }
    for message in (whole, streamed):
        for block in message["content"]:
            assert block.pop("id", "toolu_").startswith("toolu_")
    assert whole["content"] == streamed["content"]
    assert sum(whole["usage"].values()) == sum(streamed["usage"].values())
    asked = chat_of({**ASK, **options})
    chat = http.post("/v1/chat/completions", json=asked).json()
    (choice,), usage = chat["choices"], chat["usage"]
    said = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
    assert said == (choice["message"]["content"] or "")
    told = whole["usage"]
    assert told["output_tokens"] == usage["completion_tokens"]
    assert told["input_tokens"] + told["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert post(http, "/v1/messages/count_tokens", **options).json() == {
        "input_tokens": usage["prompt_tokens"]
    }
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence"}
    assert whole["stop_reason"] == reasons[choice["finish_reason"]]
    assert whole["stop_sequence"] == ("Al" if "stop_sequences" in options else None)


def test_blocks_become_a_chats_messages() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a cat"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
                 "content": [{"type": "text", "text": "no"}, image]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]  # fmt: skip
    chat = chat_of({"messages": messages, "system": "s", "max_tokens": 5, "thinking": {"type": "disabled"}})
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    again = {"id": "toolu_2", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "what is this?"}, picture]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call, again]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a cat"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no"},
        {"role": "user", "content": [picture, {"type": "text", "text": "and?"}]},
    ]
    assert chat["chat_template_kwargs"] == {"enable_thinking": False} and chat["max_tokens"] == 5
    prefilled = chat_of({"messages": [messages[0], {"role": "assistant", "content": "It is"}]})
    assert prefilled["continue_final_message"] is True


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"system": 5},
        {"tools": 5},
        {"tools": [5]},
        {"tool_choice": {"type": "wrong"}},
        {"thinking": {"type": "wrong"}},
        {"frobnicate": 1},
        {"temperature": "hot"},
    ],
)
def test_errors_have_anthropics_form(http: httpx.Client, fields: Any) -> None:
    answer = post(http, **fields)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and next(iter(fields)) in error["message"]


def test_other_errors_have_it_too(http: httpx.Client, server: Running) -> None:
    assert post(http, model="claude").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/messages").json()["type"] == "error"
    assert http.get("/v1/messages/x").json()["error"]["type"] == "not_found_error"
    assert http.post("/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"
    app = make_app(
        Service(server.service.llm, replace(server.service.settings, api_keys=("alpha",), batch_dir=None))
    )

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            found = []
            for headers in (
                {},
                {"x-api-key": "beta"},
                {"x-api-key": "alpha"},
                {"authorization": "Bearer alpha"},
            ):
                answer = await client.post("/v1/messages", json=ASK, headers=headers)
                found.append(answer.status_code)
                assert answer.status_code == 200 or answer.json()["error"]["type"] == "authentication_error"
            return found

    assert server.run(main()) == [401, 401, 200, 200]


def test_what_agents_send_unasked_is_no_error(http: httpx.Client) -> None:
    beside: Any = {
        "metadata": {"user_id": "u" * 600},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "tools": [FUNCTION, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    answer = post(http, **beside)
    assert answer.status_code == 200, answer.text
    assert http.post("/v1/messages?beta=true", json={**ASK, **beside}).status_code == 200


PIECES = st.lists(
    st.sampled_from(
        [
            "<think>hm</think>",
            "Sure. ",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n',
            '<tool_call>{"name": "add", "arguments": {"a": ',
            "</think>",
            "é\n",
        ]
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, reason=st.sampled_from(["stop", "length"]), size=st.integers(1, 40))
def test_every_message_is_taken_back_and_is_that_of_a_chat(pieces: list[str], reason: str, size: int) -> None:
    """In any cut of the text; and what a stream builds is the whole."""
    text = "".join(pieces)
    line = read("/v1/chat/completions", chat_of({**ASK, "tools": [FUNCTION]}))
    usage: Any = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    writer: Any = SimpleNamespace(usage=lambda: usage, stop_reason=None)
    builder, parser = MessageBuilder("msg_x", "m", writer), line.reading.parser(thinking=False)
    events: list[Any] = []
    for at in range(0, len(text), size):
        events += builder.add(parser.feed(text[at : at + size]))
    events += [*builder.add(parser.finish()), *builder.end(reason=reason, usage=usage, now=0)]
    message = built(json.loads(json.dumps(events)))
    assert message == builder.response
    again = {**ASK, "messages": [*ASK["messages"], message, {"role": "user", "content": "go on"}]}
    told = read("/v1/chat/completions", chat_of(again)).prompts[0].messages  # type: ignore[union-attr]
    render_chat(told, TEMPLATE)
    expected_message = read_message(line.reading, text, "x", thinking=False).message
    found, expected = normalised(told)[1], normalised([expected_message])[0]
    for each in (found, expected):
        for call in each.get("tool_calls") or ():
            call.pop("id")
    assert {name: expected[name] for name in expected if name not in ("refusal", "reasoning")} == found


def test_a_forced_call_that_is_cut_off_is_taken_back(http: httpx.Client) -> None:
    options: Any = {"tools": [FUNCTION], "tool_choice": {"type": "tool", "name": "add"}}
    message = post(http, **options, max_tokens=2).json()
    (block,) = message["content"]
    assert block["type"] == "tool_use" and set(block["input"]) <= {"arguments"}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "cut off", "is_error": True}
    messages = [*ASK["messages"], {name: message[name] for name in ("role", "content")}]
    answer = post(http, tools=[FUNCTION], messages=[*messages, {"role": "user", "content": [result]}])
    assert answer.status_code == 200, answer.text


def test_a_bodys_error_is_an_api_error() -> None:
    for body in ({}, {"messages": "x"}, {"messages": [5]}, {"messages": [{"role": "user"}]}):
        with pytest.raises(ApiError):
            chat_of(body)


def test_anthropics_client_reads_streams_and_tools(server: Running) -> None:
    """With the package `anthropic` (extra `judges`)."""
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic (extra judges) runs this test")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        plain = {name: ASK[name] for name in ("model", "max_tokens")} | {"extra_body": {"temperature": 0}}
        ask: Any = plain | {"messages": ASK["messages"]}
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert whole.content[0].text == text == final.content[0].text and final.usage.input_tokens >= 0
        assert client.messages.count_tokens(model="embedded", messages=ASK["messages"]).input_tokens > 0
        messages: list[Any] = list(ASK["messages"])
        tools: Any = {"tools": [FUNCTION], "tool_choice": {"type": "any"}, "max_tokens": 60}
        for streamed in (False, True):
            asked = {**ask, **tools, "messages": messages}
            if streamed:
                with client.messages.stream(**asked) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**asked)
            assert answer.stop_reason == "tool_use"
            (call,) = answer.content
            assert call.name == "add" and set(call.input) == {"a", "b"}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**ask, "extra_body": {"temperature": -1}})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ask, "model": "claude"})
