"""Tools and reasoning over HTTP: forced calls by grammar, free ones by the parsers, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import llguidance
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.bodies import TOOL
from tests.server.conftest import Running
from xla_engine.openai.chat_message import ChatMessage, read_message
from xla_engine.openai.requests import LineRequest, parse_record
from xla_engine.openai.responses import ResponseBuilder
from xla_engine.openai.results import completion_usage
from xla_engine.outputs import RequestOutput
from xla_engine.text.conversation import normalised
from xla_engine.text.parsers.chats import Dialect
from xla_engine.text.parsers.scan import message_of

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
        {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": 1}}]},
        {"tools": [TOOL], "parallel_tool_calls": "no"},
        {"tools": [TOOL], "tool_choice": allowed("auto", "no")},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [TOOL]}},
        {"tools": [TOOL, TOOL], "tool_choice": "required"},
        {"tools": [{"type": "function"}], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": 3},
    ):
        answer = chat(http, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("tools", "tool_choice", "parallel_tool_calls")
    assert chat(http, tools=[TOOL], tool_choice="none").status_code == 200
    assert chat(http, tool_choice="auto", parallel_tool_calls=True, reasoning_effort="low").status_code == 200


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_an_agent_gets_text_from_a_model_of_no_known_format(http: httpx.Client) -> None:
    """The request of OpenAI's agents: tools with `strict`, without `tool_choice`."""
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for path, fields in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "add"}),
    ):
        shown = tool if "messages" in fields else {"type": "function", **tool["function"]}
        answer = http.post(path, json={**fields, "tools": [shown], "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert '"type":"function_call"' not in answer.text and '"tool_calls":' not in answer.text


@pytest.fixture
def hermes(server: Running) -> Iterator[None]:
    before = server.service.dialect
    server.service.dialect = Dialect(tools="hermes")
    yield
    server.service.dialect = before


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("no call", None),
        ("a <tool", None),
        ('so\n<tool_call>\n{"name": "add", "arguments": {"a":1,"b":true}}\n</tool_call>', None),
        (2 * '<tool_call>{"name": "any", "arguments": {"x":[]}}</tool_call>\n' + "done", None),
        ("<tool_call>no JSON", "<tool_call>"),
        ('<tool_call>{"name": "none"', '<tool_call>{"name": "'),
        ('<tool_call>{"name": "add", "arguments": {"a":3', '<tool_call>{"name": "add", "arguments": {"a":'),
        ('<tool_call>{"name": "add", "arguments": {}', '<tool_call>{"name": "add", "arguments": {'),
    ],
)
def test_calls_of_strict_tools_fit_their_schemas(text: str, taken: str | None) -> None:
    """Any other text is free. taken: how far a text can go; None is all."""
    tools = [
        {"type": "function", "function": {**TOOL["function"], "strict": True}},
        {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}},
    ]
    body = {"messages": MESSAGES, "tools": tools}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    request = parse_record(line, 1, {"tool_parser": "hermes"})
    assert isinstance(request, LineRequest) and request.params.structured_outputs is not None
    assert goes(request.params.structured_outputs.grammar, text) == (text if taken is None else taken)


CITY: Any = {"type": "string"}
DAYS: Any = {"type": "array", "items": {"$ref": "#/$defs/day"}, "minItems": 1}
WEATHER: Any = {
    "type": "object",
    "properties": {"city": CITY, "unit": {"enum": ["C", "F"]}, "days": DAYS, "note": {"type": ["string", "null"]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
}  # fmt: skip
CITY_TAG, DAYS_TAG = (
    "<parameter=city>\nNew\n<b>York\n</parameter>\n",
    "<parameter=days>\n[1, 7]\n</parameter>\n",
)


def xml(*parameters: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("any </tool_call> text", None),
        (
            f"so: {xml(CITY_TAG, DAYS_TAG)} and {xml(CITY_TAG, '<parameter=unit>F</parameter>', DAYS_TAG)}",
            None,
        ),
        (xml(CITY_TAG, DAYS_TAG, "<parameter=note>\nnull\n</parameter>\n"), None),
        (xml("<parameter=x>\n{\n</parameter>\n", name="any") + "done", None),
        (xml(CITY_TAG), "<tool_call>\n<function=weather>\n" + CITY_TAG + "<"),
        (
            xml(CITY_TAG, "<parameter=unit>K"),
            "<tool_call>\n<function=weather>\n" + CITY_TAG + "<parameter=unit>",
        ),
        (
            xml(CITY_TAG, "<parameter=days>[8"),
            "<tool_call>\n<function=weather>\n" + CITY_TAG + "<parameter=days>[",
        ),
        (xml(name="none"), None),  # of no tool: text
    ],
)
def test_strict_calls_in_tags_fit_their_schemas(text: str, taken: str | None) -> None:
    """taken: how far a text can go; None is all. What the parser reads of the calls fits, too."""
    body = {"messages": MESSAGES, "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
        {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "minProperties": 1}}},
    ]}  # fmt: skip
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    request = parse_record(line, 1, {"tool_parser": "qwen3_coder"})
    assert isinstance(request, LineRequest) and request.params.structured_outputs is not None
    assert goes(request.params.structured_outputs.grammar, text) == (text if taken is None else taken)
    if taken is None:
        for name, arguments in message_of(request.reading.parser(thinking=False), text).calls or ():
            found = json.loads(arguments)
            assert name != "weather" or (found["city"] == "New\n<b>York" and found["days"] == [1, 7])


def goes(text_grammar: Any, text: str) -> str:
    """How much of a text a grammar accepts; a text that it accepts to the end must be valid."""
    grammar = llguidance.LLMatcher.grammar_from_lark(text_grammar)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    size = matcher.validate_tokens(tokenizer.tokenize_str(text))
    if size == len(text.encode()):
        assert matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()
    return text.encode()[:size].decode()


def test_a_strict_tool_changes_no_answer_without_a_call(hermes: None, http: httpx.Client) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    fields = {"temperature": 0, "max_tokens": 20}
    free, held = (chat(http, tools=[each], **fields).json()["choices"] for each in (TOOL, tool))
    assert free == held


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3", "mistral", "harmony"])
def test_strict_tools_are_taken_in_every_format(server: Running, http: httpx.Client, name: str) -> None:
    """What the Agents SDK sends without being asked, with and without a format of the answer."""
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    before = server.service.dialect
    server.service.dialect = Dialect(tools=name, reasoning="harmony" if name == "harmony" else None)
    try:
        for fields in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            answer = chat(http, tools=[tool], **fields)
            assert answer.status_code == 200, answer.text
    finally:
        server.service.dialect = before


def test_one_call_is_told_where_one_is_asked_for(hermes: None, http: httpx.Client) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    fields: Any = {"tools": [TOOL], "max_tokens": 100, "structured_outputs": {"choice": [call * 2]}}
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        message = chat(http, **fields, parallel_tool_calls=parallel).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == calls and message["content"] is None


def test_allowed_tools_are_the_only_ones(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    options: Any = {"model": "embedded", "messages": MESSAGES, "tools": [other, TOOL], "max_tokens": 60}
    for seed in range(3):
        answer = client.chat.completions.create(**options, seed=seed, tool_choice=allowed("required", "add"))
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.name == "add"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_the_tokens_were(server: Running, http: httpx.Client, stream: bool) -> None:
    reasoning, tokenizer = "<think>a b c", server.service.engine.tokenizer
    assert tokenizer is not None
    fields: Any = {"max_tokens": 100, "structured_outputs": {"choice": [f"{reasoning}</think>done"]}}
    ids = chat(http, **fields, return_token_ids=True).json()["choices"][0]["token_ids"]
    expected = next(n for n in range(len(ids)) if len(tokenizer.decode(ids[:n])) >= len(reasoning))
    before = server.service.dialect
    server.service.dialect = Dialect(reasoning="think")
    try:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        text = chat(http, **fields, **options).text
        if stream:
            text = text.split("data: ")[-2]
        usage = json.loads(text)["usage"]
        answer = http.post(
            "/v1/responses",
            json={"input": "x", "stream": stream, **fields, "max_tokens": None, "max_output_tokens": 100},
        ).text
        if stream:
            answer = json.dumps(json.loads(answer.split("data: ")[-2])["response"])
        response = json.loads(answer)["usage"]
    finally:
        server.service.dialect = before
    for details, new in (
        (usage["completion_tokens_details"], usage["completion_tokens"]),
        (response["output_tokens_details"], response["output_tokens"]),
    ):
        assert abs(details["reasoning_tokens"] - expected) <= 1 and details["reasoning_tokens"] < new
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


def test_usage_tells_of_speculation() -> None:
    output = RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        outputs=(),
        finished=True,
        num_cached_tokens=2,
        num_drafted_tokens=9,
        num_accepted_tokens=7,
    )
    details = completion_usage([output, output], new=5, reasoning=1)["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 1,
        "accepted_prediction_tokens": 14,
        "rejected_prediction_tokens": 4,
    }


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_stays_a_call(http: httpx.Client, choice: Any, stream: bool) -> None:
    tool = {"type": "function", **TOOL["function"]}
    fields = {"input": "add", "tools": [tool], "tool_choice": choice, "stream": stream}
    whole = json.dumps({"name": "add", "arguments": {}}) if choice == "required" else ""
    answer = http.post("/v1/responses", json={**fields, "max_output_tokens": len(whole) // 2 + 5})
    text = answer.text
    if stream:
        text = next(
            line for line in text.splitlines() if '"response.incomplete"' in line and line[:5] == "data:"
        )[5:]
    body = json.loads(text)
    response = body["response"] if stream else body
    assert (response["status"], response["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    (item,) = response["output"]
    assert item["type"] == "function_call" and item["name"] == "add" and item["status"] == "incomplete"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"verbosity": "low"},
        {"prediction": {"type": "content", "content": "x"}},
        {"guided_regex": "a{3}", "max_tokens": 9},
        {"guided_json": {"enum": [7]}, "max_tokens": 9},
        {"guided_choice": ["yes"], "max_tokens": 9},
    ],
)
def test_fields_that_clients_send_are_taken(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = chat(http, **fields)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    for name, text in {"guided_regex": "aaa", "guided_json": "7", "guided_choice": "yes"}.items():
        assert name not in fields or content == text
    for name in {"prediction", "verbosity"} & set(fields):
        assert chat(http, **{name: 5}).status_code == 400


def test_calls_and_reasoning_in_a_text_are_told_apart(server: Running, http: httpx.Client) -> None:
    """A grammar forces the model to write a certain text, so that there is something to parse."""
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


CUSTOM: Any = {"name": "apply_patch", "description": "Edits files", "format": {"type": "text"}}
HERMES: Any = {"tool_parser": "hermes", "reasoning_parser": "think"}


def read(url: str, body: dict[str, Any]) -> LineRequest:
    request = parse_record({"method": "POST", "url": url, "body": body}, 1, HERMES)
    assert isinstance(request, LineRequest), request
    return request


def test_tools_of_other_servers_are_left_out_with_one_warning(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """As Codex sends them; and no choice of them is an error."""
    others: Any = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "mcp", "server_label": "x"}]
    function: Any = {"type": "function", **TOOL["function"], "strict": False}
    for tools in ([function, *others, {"type": "custom", **CUSTOM}], others):
        for choice in (
            "auto",
            "required",
            {"type": "web_search"},
            {"type": "allowed_tools", "mode": "auto", "tools": others[:1]},
        ):
            options: Any = {"tools": tools, "tool_choice": choice, "max_output_tokens": 8}
            client.responses.create(model="embedded", input="hi", temperature=0, **options)
            nested = [{"type": "function", "function": TOOL["function"]}, *others]
            client.chat.completions.create(
                model="embedded", messages=MESSAGES, max_tokens=8, tools=nested if tools[0] is function else others,
                tool_choice=choice if isinstance(choice, str) else "auto",
            )  # fmt: skip
    told = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert sorted(told) == sorted(set(told)) and len(told) <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_a_plain_text_and_taken_back(
    client: openai.OpenAI, stream: bool
) -> None:
    """Forced calls of the embedded model, in a response and in a chat. Both are sent back with a result."""
    shared: Any = {"model": "embedded", "temperature": 0}
    options: Any = shared | {"tools": [{"type": "custom", **CUSTOM}], "max_output_tokens": 80}
    choice: Any = {"type": "custom", "name": "apply_patch"}
    found: Any = client.responses.create(**options, input="hi", tool_choice=choice, stream=stream)
    if stream:
        events = list(found)
        (item,) = events[-1].response.output
        deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == item.input
    else:
        (item,) = found.output
    assert item.type == "custom_tool_call" and item.name == "apply_patch" and '{"input"' not in item.input[:9]
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    client.responses.create(**options, input=[{"role": "user", "content": "hi"}, item.to_dict(), result])

    options = shared | {"tools": [{"type": "custom", "custom": CUSTOM}], "max_tokens": 80}
    choice = {"type": "custom", "custom": {"name": "apply_patch"}}
    answer: Any = client.chat.completions.create(
        **options, messages=MESSAGES, tool_choice=choice, stream=stream
    )
    if stream:
        pieces = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert pieces[0].type == "custom"
        call = {
            **pieces[0].to_dict(),
            "custom": {"name": "apply_patch", "input": "".join(p.custom["input"] for p in pieces)},
        }
        message: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    else:
        message = answer.choices[0].message.to_dict()
        (call,) = message["tool_calls"]
    assert call["custom"] == {"name": "apply_patch", "input": item.input}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    client.chat.completions.create(**options, messages=[*MESSAGES, message, result])


def test_functions_of_the_older_form_are_answered_in_that_form(client: openai.OpenAI) -> None:
    options: Any = {"model": "embedded", "functions": [TOOL["function"]], "max_tokens": 60, "seed": 1}
    options["function_call"] = {"name": "add"}
    choice = client.chat.completions.create(messages=MESSAGES, **options).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    call = choice.message.function_call
    assert call is not None and json.loads(call.arguments)["a"] in (1, 2)
    chunks = list(client.chat.completions.create(messages=MESSAGES, **options, stream=True))
    pieces = [each for chunk in chunks if (each := chunk.choices[0].delta.function_call)]
    assert pieces[0].name == "add" and "".join(each.arguments or "" for each in pieces) == call.arguments
    result: Any = {"role": "function", "name": "add", "content": "3"}
    client.chat.completions.create(messages=[*MESSAGES, choice.message.to_dict(), result], **options)


WRITTEN = st.lists(
    st.sampled_from(
        [
            "<think>hm</think>",
            "Sure. ",
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** \\"x\\"\\n"}}\n</tool_call>\n',
            '<tool_call>{"name": "add", "arguments": {"a": ',
            "</think>",
            "é\n",
        ]
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(pieces=WRITTEN, size=st.integers(1, 40))
def test_the_increments_of_a_chat_add_up_to_the_message(pieces: list[str], size: int) -> None:
    """In any cut of the text, and with the same ids of calls."""
    text, tools = "".join(pieces), [TOOL, {"type": "custom", "custom": CUSTOM}]
    reading = read(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    ).reading
    streamed, parser = ChatMessage(reading, "x"), reading.parser(thinking=False)
    deltas = [
        each for at in range(0, len(text), size) for each in streamed.add(parser.feed(text[at : at + size]))
    ]
    told: dict[str, Any] = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for delta in [*deltas, *streamed.add(parser.finish())]:
        for name in told:
            told[name] += delta.get(name, "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part.pop("index") == len(calls)
                calls.append(part)
            elif "custom" in part:
                calls[part["index"]]["custom"]["input"] += part["custom"]["input"]
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message = read_message(reading, text, "x", thinking=False).message
    assert message == streamed.message
    assert message.get("tool_calls", []) == calls
    assert {name: message.get(name) or "" for name in told} == told


@settings(max_examples=60, deadline=None)
@given(pieces=WRITTEN, reason=st.sampled_from(["stop", "length"]), size=st.integers(1, 40))
def test_an_answer_is_the_same_conversation_in_each_form(pieces: list[str], reason: str, size: int) -> None:
    """What a chat and a response return for one text, each sent back to its own path, are the same messages."""
    text, asked = "".join(pieces), [{"role": "user", "content": "hi"}]
    flat: Any = [
        {"type": "function", **TOOL["function"]},
        {"type": "custom", **CUSTOM},
        {"type": "web_search"},
    ]
    chat = read(
        "/v1/chat/completions", {"messages": asked, "tools": [TOOL, {"type": "custom", "custom": CUSTOM}]}
    )
    message = read_message(chat.reading, text, "x", thinking=False).message
    line = read("/v1/responses", {"input": asked, "tools": flat})
    assert line.reading.tools == chat.reading.tools
    builder = ResponseBuilder("r", body={}, model="m", created=0, custom=line.reading.offered.custom)
    parser = line.reading.parser(thinking=False)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    list(builder.add([*events, *parser.finish()]))
    list(builder.end(reason=reason, usage={}, now=0))
    back = [*asked, message], [*asked, *builder.output]
    chats = [
        read("/v1/chat/completions", {"messages": back[0], "tools": chat.prompts[0].options["tools"]}),  # type: ignore[union-attr]
        read("/v1/responses", {"input": back[1], "tools": flat}),
    ]
    told = [normalised(each.prompts[0].messages)[-1] for each in chats]  # type: ignore[union-attr]
    for message in told:
        for name in ("refusal", "reasoning"):
            message.pop(name, None)
        for call in message.get("tool_calls") or ():
            call.pop("id")
    assert told[0] == told[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_is_taken_back(client: openai.OpenAI, stream: bool) -> None:
    """With its result, by chats and by responses; the message as the client's own types dump it, nulls included."""
    tool: Any = {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }
    shared: Any = {"model": "embedded", "temperature": 0}
    for most in (1, 6, 12):
        options = shared | {
            "messages": MESSAGES,
            "tools": [tool],
            "tool_choice": "required",
            "max_tokens": most,
        }
        if stream:
            with client.chat.completions.stream(**options) as chunks:
                list(chunks)
                message: Any = chunks.current_completion_snapshot.choices[0].message.model_dump(
                    exclude={"parsed"}
                )
        else:
            message = client.chat.completions.create(**options).choices[0].message.model_dump()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "cut off"}
            for call in message["tool_calls"] or ()
        ]
        for call in message["tool_calls"] or ():
            call["function"].pop("parsed_arguments", None)
        again = client.chat.completions.create(
            **shared, messages=[*MESSAGES, message, *results], tools=[tool], max_tokens=2
        )
        assert again.usage is not None and again.usage.prompt_tokens > 0
        flat: Any = {"type": "function", **tool["function"]}
        asked = shared | {
            "input": "hi",
            "tools": [flat],
            "tool_choice": "required",
            "max_output_tokens": most,
        }
        found: Any = client.responses.create(**asked, stream=stream)
        output = (list(found)[-1].response if stream else found).output
        back = [*(each.model_dump() for each in output)]
        back += [
            {"type": "function_call_output", "call_id": each.call_id, "output": "cut off"}
            for each in output
            if each.type == "function_call"
        ]
        client.responses.create(
            **shared, input=[{"role": "user", "content": "hi"}, *back], tools=[flat], max_output_tokens=2
        )
