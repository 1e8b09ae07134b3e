"""The law of parsers: streamed deltas join to the unstreamed message, for every cut of the text."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_engine.text.parsers.choose import TOOL_PARSERS, Dialect, forced
from xla_engine.text.parsers.formats import Hermes, Plain, Think
from xla_engine.text.parsers.scan import Message, Parser, message_of

PARSERS: dict[str, Callable[[], Parser]] = {
    **TOOL_PARSERS,
    "think": lambda: Think(Plain(), begun=False),
    "think, begun": lambda: Think(Plain(), begun=True),
    "think, hermes": lambda: Think(Hermes(), begun=False),
    "forced": lambda: forced(None),
    "named": lambda: forced("f"),
}
CALL = '{"name": "f", "arguments": {"a": [1, 2.50], "b": "<tool_call> \\" ]}"}}'
PIECES = [
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
@settings(max_examples=150, deadline=None)
def test_every_cut_gives_the_same_message(name: str, text: str, data: st.DataObject) -> None:
    whole = message_of(PARSERS[name](), text)
    parser, streamed, place = PARSERS[name](), Message(), 0
    while place < len(text):
        size = data.draw(st.integers(1, 9))
        streamed.add(parser.feed(text[place : place + size]))
        place += size
    streamed.add(parser.finish())
    assert streamed == whole


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "think"])
@given(text=texts)
@settings(max_examples=150, deadline=None)
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
    ],
)
def test_formats(name: str, text: str, expected: Message) -> None:
    found = message_of(PARSERS[name](), text)
    arguments = '{"a": [1, 2.50], "b": "<tool_call> \\" ]}"}'
    assert [call[1] for call in found.calls or ()] == [arguments] * len(found.calls or ())
    assert [call[0] for call in found.calls or ()] == [call[0] for call in expected.calls or ()]
    assert (found.content, found.reasoning) == (expected.content, expected.reasoning)
    assert all(json.loads(call[1]) for call in found.calls or ())


def test_the_template_tells_the_format() -> None:
    assert Dialect.of("... <tool_call> ... <think>") == Dialect(tools="hermes", reasoning="think")
    assert Dialect.of("<|channel|>") == Dialect(tools="harmony", reasoning="harmony")
    assert Dialect.of("<tool_call>", "mistral", "none") == Dialect(tools="mistral")
    assert Dialect.of("plain") == Dialect()
