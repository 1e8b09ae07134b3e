"""The law of parsers: streamed deltas join to the unstreamed message, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from xla_engine.text.parsers.chats import TOOL_PARSERS, Dialect
from xla_engine.text.parsers.formats import first_call, forced, plain, think
from xla_engine.text.parsers.scan import Message, Parser, message_of
from xla_engine.text.parsers.thoughts import THOUGHTS
from xla_engine.text.parsers.tool_calls import tool_calls

SCHEMA = {
    "type": "object",
    "$defs": {"Days": {"type": "integer"}},
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/Days"},
        "tags": {"type": ["array", "null"]},
        "wet": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    },
}
PARSERS: dict[str, Callable[[], Parser]] = {
    **{name: partial(make, {"f": SCHEMA}) for name, make in TOOL_PARSERS.items()},
    "first of hermes": lambda: first_call(tool_calls({})),
    "think": lambda: think(plain(), begun=False),
    "think, begun": lambda: think(plain(), begun=True),
    "think, hermes": lambda: think(tool_calls({}), begun=False),
    **{
        f"think, {name}": partial(lambda name: think(tool_calls({}), begun=False, tags=THOUGHTS[name]), name)
        for name in ("gemma4", "mistral", "seed_oss")
    },
    "forced": lambda: forced(None),
    "named": lambda: forced("f"),
}
CALL = '{"name": "f", "arguments": {"a": [1, 2.50], "b": "<tool_call> \\" ]}"}}'
XML = (
    "<function=f>\n<parameter=city>\nA <parameter=\n</parameter>\n<parameter=days>3</parameter>\n</function>"
)
PIECES = [
    XML,
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "final", "assistant"),
    *(
        "commentary to=functions.g ",
        CALL,
        f"[{CALL}, {CALL}]",
        f"{CALL}; {CALL}",
        "<",
        "{",
        "[",
        " ",
        "\n",
        "a",
        "é",
    ),
]
texts = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@given(text=texts, data=st.data())
@settings(max_examples=examples(40, 150), deadline=None)
def test_every_cut_gives_the_same_message(name: str, text: str, data: st.DataObject) -> None:
    whole = message_of(PARSERS[name](), text)
    parser, streamed, place = PARSERS[name](), Message(), 0
    while place < len(text):
        size = data.draw(st.integers(1, 9))
        streamed.add(parser.feed(text[place : place + size]))
        place += size
    streamed.add(parser.finish())
    assert streamed == whole


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3", "mistral", "think"])
@given(text=texts)
@settings(max_examples=examples(40, 150), deadline=None)
def test_a_text_without_calls_and_reasoning_is_content_to_the_letter(name: str, text: str) -> None:
    message = message_of(PARSERS[name](), text)
    if not message.calls and not message.reasoning and not ("<think>" in text and name == "think"):
        assert message.content == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>",
            Message("Let me see.", "", [["f", ""]]),
        ),
        (
            "hermes",
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            Message("", "", [["f", ""]] * 2),
        ),
        ("hermes", "<tool_call>{no}</tool_call> x", Message("<tool_call>{no}</tool_call> x")),
        ("hermes", f"<tool_call>{CALL}", Message("", "", [["f", ""]])),
        ("llama3", CALL.replace("arguments", "parameters"), Message("", "", [["f", ""]])),
        ("llama3", f"<|python_tag|>{CALL}; {CALL}", Message("", "", [["f", ""]] * 2)),
        ("llama3", '{"a": 1} is JSON', Message('{"a": 1} is JSON')),
        ("mistral", f"ok [TOOL_CALLS][{CALL}]", Message("ok", "", [["f", ""]])),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": [1, 2.50], "b": "<tool_call> \\" ]}"}',
            Message("", "", [["f", ""]]),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": [1, 2.50], "b": "<tool_call> \\" ]}"}<|call|>',
            Message("", "hm", [["f", ""]]),
        ),
        ("harmony", "<|channel|>final<|message|>hello<|return|>", Message("hello")),
        ("think", "<think>\nhm\n</think>\n\nhello", Message("hello", "hm\n")),
        ("think, begun", "hm</think>hello <think>", Message("hello <think>", "hm")),
        ("think, hermes", f"<think>a</think><tool_call>{CALL}</tool_call>", Message("", "a", [["f", ""]])),
        (
            "think, gemma4",
            "<|channel>thought\nhm\n<channel|>Well. <|tool_call>"
            'call:f{a: [1, 2.50], b: <|"|><tool_call> " ]}<|"|>}<tool_call|>',
            Message("Well.", "hm\n", [["f", ""]]),
        ),
        ("think, mistral", "[THINK]hm[/THINK] hello", Message("hello", "hm")),
        ("think, seed_oss", "<seed:think>hm</seed:think>hello", Message("hello", "hm")),
    ],
)
def test_formats(name: str, text: str, expected: Message) -> None:
    found = message_of(PARSERS[name](), text)
    arguments = '{"a": [1, 2.50], "b": "<tool_call> \\" ]}"}'
    assert [call[1] for call in found.calls or ()] == [arguments] * len(found.calls or ())
    assert [call[0] for call in found.calls or ()] == [call[0] for call in expected.calls or ()]
    assert (found.content, found.reasoning) == (expected.content, expected.reasoning)
    assert all(json.loads(call[1]) for call in found.calls or ())


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"city": "\nParis\n", "days": "\n3\n"}, {"city": "Paris", "days": 3}),
        ({"city": "5", "days": "three"}, {"city": "5", "days": "three"}),
        ({"city": "a\nb <parameter=x> </function>", "tags": "[1, {}]"}, None),
        ({"tags": "None", "wet": "True"}, {"tags": None, "wet": True}),
        ({"tags": "3", "wet": "maybe", "unknown": "3"}, {"tags": "3", "wet": "maybe", "unknown": "3"}),
        ({}, {}),
    ],
)
def test_the_schema_tells_what_a_value_in_tags_is(
    parameters: dict[str, str], expected: dict[str, Any] | None
) -> None:
    written = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in parameters.items())
    text = f"ok\n<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    found = message_of(PARSERS["qwen3_coder"](), text)
    if expected is None:  # what is written in the value is text, too
        expected = {"city": parameters["city"], "tags": [1, {}]}
    assert found.content == "ok"
    assert [(name, json.loads(arguments)) for name, arguments in found.calls or ()] == [("f", expected)]


@pytest.mark.parametrize(
    "text", ["<function=f>\n<parameter=city>\nPar", "<function=f><parameter=city>a", "f", ""]
)
def test_a_call_in_tags_that_was_cut_off_is_content(text: str) -> None:
    found = message_of(PARSERS["qwen3_coder"](), f"<tool_call>{text}")
    assert not found.calls and found.content == f"<tool_call>{text}"


def test_calls_after_the_first_are_left_out() -> None:
    found = message_of(
        PARSERS["first of hermes"](), f"a<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>b"
    )
    assert (found.content, len(found.calls or ())) == ("ab", 1)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "arguments": {"a": [1', [["f", '{"a": [1']]),
        ('{"name": "f", "argu', [["f", ""]]),
        ('{"name": "f', None),
        ("", None),
    ],
)
def test_a_forced_call_that_was_cut_off_is_a_call(text: str, calls: list[list[str]] | None) -> None:
    assert message_of(forced(None), text) == Message(calls=calls or [])


def test_the_template_tells_the_format() -> None:
    assert Dialect.of("<tool_call> <function=example>") == Dialect(tools="qwen3_coder")
    assert Dialect.of("... <tool_call> ... <think>") == Dialect(tools="hermes", reasoning="think")
    assert Dialect.of("<|channel|>") == Dialect(tools="harmony", reasoning="harmony")
    assert Dialect.of("<tool_call>", "mistral", "none") == Dialect(tools="mistral")
    assert Dialect.of("plain") == Dialect(tools="json")
    assert Dialect.of("'<|tool_call>call:' + '<|channel>thought'") == Dialect(
        tools="gemma4", reasoning="gemma4"
    )
    assert Dialect.of("[TOOL_CALLS] [THINK]") == Dialect(tools="mistral", reasoning="mistral")
    assert Dialect.of("<seed:think>") == Dialect(tools="json", reasoning="seed_oss")
    assert Dialect.of("<tool_call>{name}<arg_key>") == Dialect(tools="glm")
