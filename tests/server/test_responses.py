"""The Responses API: the openai client reads it, streamed and whole, and both are the same response."""

from __future__ import annotations

import io
import json
import re
import time
import typing
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import response_input_item_param as known

from tests.server.bodies import TEMPLATE, TOOL
from tests.server.conftest import Running
from xla_engine.batch.datasets.output import result_row
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.errors import InvalidRequestError
from xla_engine.openai.requests import LineError, parse_record
from xla_engine.openai.response_items import OTHER_ITEMS
from xla_engine.openai.responses import MessageLogprobs, ResponseBuilder, chat_body
from xla_engine.openai.results import ResultHeader
from xla_engine.server.errors import ApiError
from xla_engine.server.responses import Memory, StoredItem
from xla_engine.utils import warn_once

ASK: Any = {"model": "embedded", "input": "def add(a, b):", "max_output_tokens": 12, "temperature": 0}
FUNCTION: Any = {"type": "function", **TOOL["function"], "strict": True}


def plain(response: Any) -> list[Any]:
    """A response's items without their ids, which are new each time."""
    return [
        {key: value for key, value in item.model_dump().items() if key not in ("id", "call_id")}
        for item in response.output
    ]


@pytest.mark.parametrize(
    "options", [{}, {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60}]
)
def test_streamed_events_build_the_whole_response(client: openai.OpenAI, options: Any) -> None:
    whole = client.responses.create(**{**ASK, **options})
    assert whole.status == ("completed" if options else "incomplete")
    events = list(client.responses.create(**{**ASK, **options}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert plain(last.response) == plain(whole) and last.response.usage == whole.usage
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    if options:
        (call,) = whole.output
        arguments = [
            event.delta for event in events if event.type == "response.function_call_arguments.delta"
        ]
        assert call.type == "function_call" and "".join(arguments) == call.arguments


def test_a_response_has_the_text_of_a_chat(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, instructions="be short")
    messages: Any = [{"role": "system", "content": "be short"}, {"role": "user", "content": ASK["input"]}]
    chat = client.chat.completions.create(model="embedded", messages=messages, max_tokens=12, temperature=0)
    assert response.output_text == chat.choices[0].message.content


@pytest.mark.parametrize("asked", [{"top_logprobs": 3}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI, asked: Any) -> None:
    """In the whole response, in a stream's deltas together, and in a stored response that another continues."""
    whole = client.responses.create(**ASK, **asked, store=True)
    chat = client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": ASK["input"]}], max_tokens=12, temperature=0,
        logprobs=True, top_logprobs=(top := asked.get("top_logprobs", 0)),
    )  # fmt: skip
    (part,), told = whole.output[0].content, chat.choices[0].logprobs.content
    assert whole.top_logprobs == top and len(part.logprobs) == 12
    assert [each.to_dict() for each in part.logprobs] == [each.to_dict() for each in told]
    assert all(len(each.top_logprobs) == top for each in part.logprobs)
    events: list[Any] = list(client.responses.create(**ASK, **asked, stream=True))
    deltas = [each for event in events if event.type.endswith("text.delta") for each in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [each.to_dict() for each in deltas] == [each.to_dict() for each in part.logprobs]
    assert [each.to_dict() for each in done.logprobs] == [each.to_dict() for each in deltas]
    assert plain(events[-1].response) == plain(whole)
    assert client.responses.retrieve(whole.id) == whole
    assert client.responses.create(**ASK, previous_response_id=whole.id).output[0].content[0].logprobs == []


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_log_probabilities_stand_beside_the_text_of_their_tokens(size: int) -> None:
    """Log-probabilities of reasoning and calls are not returned, streamed or not; tokens without text belong to the
    message."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tokens = [
        "<think>",
        "hm",
        "</th",
        "ink>",
        "\n",
        "one",
        "",
        " <two",
        call[:20],
        call[20:],
        "thr",
        "ee",
        "",
    ]
    body = {**ASK, "tools": [FUNCTION | {"name": "f", "strict": None}], "top_logprobs": 1}
    line = {"method": "POST", "url": "/v1/responses", "body": body}
    request = parse_record(line, 1, {"tool_parser": "hermes", "reasoning_parser": "think"})
    assert not isinstance(request, LineError)
    logprobs = MessageLogprobs(request.reading.parser(thinking=False), Spelled(tokens).incremental())
    parser = request.reading.parser(thinking=False)
    builder = ResponseBuilder("r", body=body, model="m", created=0, logprobs=logprobs)
    deltas = []
    for begin in range(0, len(tokens), size):
        ids = range(len(tokens))[begin : begin + size]
        logprobs.add(ids, ids)
        events = parser.feed("".join(tokens[begin : begin + size]))
        if begin + size >= len(tokens):
            logprobs.finish()
            events += parser.finish()
        deltas += [*builder.add(events)]
    deltas += [*builder.end(reason="stop", usage={}, now=0)]
    parts = [item["content"][0] for item in builder.output if item["type"] == "message"]
    assert [(part["text"], part["logprobs"]) for part in parts] == [
        ("one <two", [5, 6, 7]),
        ("three", [10, 11, 12]),
    ]
    assert [each for event in deltas if event["type"].endswith("text.delta") and "logprobs" in event
            for each in event["logprobs"]] == [5, 6, 7, 10, 11, 12]  # fmt: skip


class Spelled:
    """A tokenizer of tokens with these texts."""

    def __init__(self, texts: list[str]) -> None:
        self.push = texts.__getitem__

    def token_bytes(self, token_id: int) -> bytes:
        return self.push(token_id).encode()

    def incremental(self, skip_special_tokens: bool = True) -> Any:
        return self


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_follows_another_that_was_kept(client: openai.OpenAI, stream: bool) -> None:
    """It has the same text as a request whose input contains the whole conversation."""
    first = client.responses.create(**ASK, store=True)
    assert client.responses.retrieve(first.id) == first and first.store is True
    follow: Any = {**ASK, "input": "and sub", "previous_response_id": first.id, "store": True}
    answer: Any = client.responses.create(**follow, stream=stream)
    second = list(answer)[-1].response if stream else answer
    before = [{"role": "user", "content": ASK["input"]}, *(item.to_dict() for item in first.output)]
    whole = client.responses.create(**{**ASK, "input": [*before, {"role": "user", "content": "and sub"}]})
    assert plain(second) == plain(whole) and second.previous_response_id == first.id and whole.store is False
    client.responses.delete(first.id)
    # the second holds all it needs
    third = client.responses.create(**{**ASK, "previous_response_id": second.id})
    assert third.usage.input_tokens > second.usage.input_tokens  # type: ignore[union-attr]
    for gone in (first.id, whole.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="is not kept here"):
            client.responses.create(**{**ASK, "previous_response_id": gone})


def test_memory_is_bounded_and_shows_nobody_anothers_responses() -> None:
    memory = Memory(tenant_bytes=3300, total_bytes=4800)

    def item(size: int) -> StoredItem:
        return StoredItem("", msgspec.Raw(msgspec.json.encode("x" * size)))

    for number in range(40):
        memory.keep("a" if number % 4 else "b", {"id": f"r{number}"}, [item(100)])
        assert memory.find("b" if number % 4 else "a", f"r{number}") is None
    kept = [number for number in range(40) if memory.find("a" if number % 4 else "b", f"r{number}")]
    assert kept[-1] == 39 and 10 <= len(kept) <= 12 and {number % 4 == 0 for number in kept} == {True, False}
    memory.keep("c", {"id": "large"}, [item(4000)])  # does not fit, and moves nobody out
    assert memory.find("c", "large") is None and memory.find("a", "r39") is not None


def test_what_the_api_has_for_other_tools_is_left_out(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every type of item of the openai client is a message or call here, or leaves the answer as it is."""
    monkeypatch.setattr(warn_once, "_warned", set())
    hints = [typing.get_type_hints(each)["type"] for each in typing.get_args(known.ResponseInputItemParam)]
    types = {literal for hint in hints for literal in re.findall(r"'(\w+)'", str(hint))}
    own = {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
    assert types - OTHER_ITEMS == own | {"reasoning", "item_reference"}
    user = {"role": "user", "content": ASK["input"]}
    others: list[Any] = [
        {"type": each, "id": f"x_{each}", "status": "completed"} for each in sorted(OTHER_ITEMS)
    ]
    plainly = client.responses.create(**ASK)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            response = client.responses.create(**{**ASK, "input": [*others, user, *others]})
            assert response.output_text == plainly.output_text and response.usage == plainly.usage
    told = [record.args[0] for record in caplog.records if "left out" in record.msg and record.args]
    assert sorted(told) == sorted(OTHER_ITEMS), "each is logged once"
    with pytest.raises(openai.BadRequestError, match="holds nothing that a model can read"):
        client.responses.create(**{**ASK, "input": others})
    with pytest.raises(openai.BadRequestError, match="has type 'web_serch_call', which is not supported"):
        client.responses.create(**{**ASK, "input": [user, {"type": "web_serch_call"}]})


def test_a_reference_to_a_stored_item_is_the_item(client: openai.OpenAI) -> None:
    required: Any = {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60}
    stored = client.responses.create(**{**ASK, **required}, store=True)
    (call,) = stored.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    user = {"role": "user", "content": ASK["input"]}
    asked: dict[str, Any] = {**ASK, "tools": [FUNCTION]}
    whole = client.responses.create(**{**asked, "input": [user, call.to_dict(), result]})
    holders = []
    for reference in ({"type": "item_reference", "id": call.id}, {"id": call.id}):
        input_: Any = [user, reference, result]
        again = client.responses.create(**{**asked, "input": input_}, store=True)
        assert plain(again) == plain(whole) and again.usage == whole.usage
        holders.append(again.id)
        following = client.responses.create(**ASK, previous_response_id=again.id)
        assert following.usage is not None and whole.usage is not None
        assert following.usage.input_tokens > whole.usage.input_tokens, "what it stored has the item"
    with pytest.raises(
        openai.BadRequestError, match=r"input\[1\] refers to the item 'fc_1', which is not kept here"
    ):
        client.responses.create(**{**asked, "input": [user, {"type": "item_reference", "id": "fc_1"}]})
    with pytest.raises(openai.BadRequestError, match="is in the input already"):
        client.responses.create(**{**asked, "input": [user, {"id": call.id}, {"id": call.id}]})
    for name in (stored.id, *holders):
        client.responses.delete(name)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.responses.create(**{**asked, "input": [user, {"id": call.id}]})


@pytest.mark.parametrize("own", [{}, {"id": None}, {"id": "msg_mine"}])
def test_a_reference_to_an_item_of_a_stored_input_is_the_item(
    client: openai.OpenAI, own: dict[str, Any]
) -> None:
    """What `input_items` lists, also of a conversation that went on."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}', **own}
    input_: list[Any] = [
        {"role": "user", "content": ASK["input"]},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ]
    asked: dict[str, Any] = {**ASK, "tools": [FUNCTION]}
    whole = client.responses.create(**{**asked, "input": input_}, store=True)
    follows = client.responses.create(**{**asked, "previous_response_id": whole.id, "store": True})
    listed = [item.id for item in client.responses.input_items.list(whole.id, order="asc")]
    told = [item.id for item in client.responses.input_items.list(follows.id, order="asc")]
    assert told[: len(listed)] == listed and len(set(told)) == len(told) == len(listed) + 2
    client.responses.delete(whole.id)
    again = client.responses.create(
        **{**asked, "input": [{"id": name, "type": "item_reference"} for name in listed]}
    )
    assert plain(again) == plain(whole) and again.usage == whole.usage
    mixed: Any = [input_[0], {"id": listed[1]}, input_[2]]
    assert plain(client.responses.create(**{**asked, "input": mixed})) == plain(whole)
    client.responses.delete(follows.id)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.responses.create(**{**asked, "input": mixed})


def test_memory_forgets_items_with_their_response() -> None:
    memory = Memory(tenant_bytes=3000)
    for number in range(20):
        items = [{"id": f"i{number}", "x": "x" * 100}, {"id": "of all", "x": number}]
        memory.keep("a", {"id": f"r{number}"}, [StoredItem.of(item) for item in items])
        assert memory.resolved("a", [{"id": item["id"]} for item in items]) == items
        with pytest.raises(ApiError):
            memory.resolved("b", [{"id": f"i{number}"}])
    with pytest.raises(ApiError):
        memory.resolved("a", [{"id": "i0"}])
    for number in range(20):
        if memory.find("a", f"r{number}"):
            memory.delete("a", f"r{number}")
    assert not (memory._kept or memory._held or memory._items or memory._holders)


def test_a_reference_in_a_file_says_what_to_do() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"input \[0\] refers to the item 'msg_1', which is not here"
    ):
        chat_body({"input": [{"type": "item_reference", "id": "msg_1"}]})


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    system, calls, result = chat_body({"input": items})["messages"]
    assert system == {"role": "developer", "content": "a"}
    assert [call["id"] for call in calls["tool_calls"]] == ["1", "2"]
    assert result == {"role": "tool", "tool_call_id": "1", "content": "x"}


def test_input_items_of_a_response_are_listed_in_pages(client: openai.OpenAI, http: httpx.Client) -> None:
    texts = ["one", "two", "three"]
    items: Any = [{"role": "user", "content": text} for text in texts]
    made = client.responses.create(
        **{**ASK, "input": items}, store=True, include=["reasoning.encrypted_content"]
    )
    assert [item.content for item in client.responses.input_items.list(made.id)] == texts[::-1]  # type: ignore[union-attr]
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content for item in pages] == texts  # type: ignore[union-attr]
    follows = client.responses.create(**ASK, previous_response_id=made.id, store=True)
    assert len(client.responses.input_items.list(follows.id).data) == 5
    for query in ("limit=0", "limit=x", "limit=101"):
        assert http.get(f"/v1/responses/{made.id}/input_items?{query}").status_code == 400
    assert http.get("/v1/responses/resp_none/input_items").status_code == 404


def test_a_response_that_is_too_long_may_go_without_its_oldest_items(http: httpx.Client) -> None:
    """Instructions stay, and the answer is the one to the remaining items."""
    items: list[Any] = [
        {"role": "user", "content": f"{number} " + "def f(x): return x\n" * 4} for number in range(24)
    ]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items[14:14] = [call, {"type": "function_call_output", "call_id": "1", "output": "x"}]
    asked = {**ASK, "instructions": "be brief", "input": items}
    refused = http.post("/v1/responses", json=asked).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    answer = http.post("/v1/responses", json={**asked, "truncation": "auto"}).json()
    assert answer["truncation"] == "auto" and answer["status"] == "incomplete"
    kept = next(
        found
        for without in (1, 3, 7, 16)  # the fifteenth begins with the result of a call that went
        if (found := http.post("/v1/responses", json={**asked, "input": items[without:]})).status_code == 200
    ).json()
    assert answer["output"][0]["content"] == kept["output"][0]["content"]
    assert answer["usage"]["input_tokens"] == kept["usage"]["input_tokens"]
    one = {**asked, "input": items[0]["content"] * 20, "truncation": "auto"}
    assert http.post("/v1/responses", json=one).status_code == 400


def test_lines_have_the_responses_of_posts(
    client: openai.OpenAI, http: httpx.Client, server: Running
) -> None:
    """In a batch of the server, and in a run of a file, which is repeated to the byte."""
    bodies: list[dict[str, Any]] = [
        ASK,
        {**ASK, "instructions": "be brief", "metadata": {"a": "b"}, "store": True},
        {**ASK, "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60},
        {**ASK, "top_logprobs": 2},
        {**ASK, "input": [{"role": "user", "content": "x"}], "text": {"format": {"type": "json_object"}}},
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    source = client.files.create(file=("r.jsonl", data), purpose="batch")
    made = client.batches.create(input_file_id=source.id, endpoint="/v1/responses", completion_window="24h")
    while made.status not in ("completed", "failed"):
        time.sleep(0.05)
        made = client.batches.retrieve(made.id)
    assert made.status == "completed" and made.output_file_id is not None, made.errors
    told = client.files.content(made.output_file_id).read().splitlines()
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, told)}
    for number, body in enumerate(bodies):
        assert without_ids(found[str(number)]) == without_ids(http.post("/v1/responses", json=body).json())
        assert found[str(number)]["object"] == "response"
    engine = server.service.engine
    runs = []
    for _ in range(2):
        sink, header = io.BytesIO(), ResultHeader(created=0, model="embedded", tokenizer=engine.tokenizer)
        given = BatchRun(
            server.service.engine,
            read_lines(io.BytesIO(data)),
            sink,
            header=header,
            ordered=True,
            defaults={"chat_template": TEMPLATE},
        )
        server.run(_ran(given))
        runs.append(sink.getvalue())
    assert runs[0] == runs[1]
    for number, line in enumerate(runs[0].splitlines()):
        row = result_row(line)
        assert row["num_generated_tokens"] == found[str(number)]["usage"]["output_tokens"]
    for body in (
        {**ASK, "previous_response_id": "resp_1"},
        {**ASK, "stream": True},
        {"input": []},
        {**ASK, "truncation": "auto"},
    ):
        line = {"method": "POST", "url": "/v1/responses", "body": body}
        assert isinstance(parse_record(line, 1), LineError)


async def _ran(given: BatchRun) -> None:
    given.run()


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without the fields that differ between answers, and without calls, which a batch does not extract."""
    items = [{**item, "id": None, "call_id": None} for item in response["output"]]
    times = dict.fromkeys(("id", "created_at", "completed_at"))
    cached = {**response["usage"], "input_tokens_details": None}
    return {**response, **times, "output": items, "usage": cached}


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["file_search_call.scores"]},
        {"include": 5},
        {"top_logprobs": 21},
        {"top_logprobs": True},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"input": []},
        {"input": [{"type": "input_image"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"tools": ["web_search"]},
        {"frobnicate": 1},
    ],
)
def test_what_needs_more_than_text_is_refused_by_name(http: httpx.Client, fields: Any) -> None:
    answer = http.post("/v1/responses", json={**ASK, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))
