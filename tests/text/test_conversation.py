"""What a server returned it takes back, and no template drops a message's text without an error."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import default
from xla_engine.errors import ChatTemplateError
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.text.chat_template import render_chat
from xla_engine.text.conversation import forms, normalised, parsed_arguments

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
# One system message, which comes first; calls one by one, with ids of nine characters and arguments that are objects.
STRICT = """{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('system') }}
{% endif %}S:{{ m.content }}
{% elif m.role == 'user' %}U:{{ m.content }}
{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}T:{{ m.content }}
{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
C:{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}
{% endfor %}{% else %}A:{{ m.content + '' }}
{% endif %}{% endfor %}"""
# Arguments that are text, and null content beside calls.
TEXTUAL = """{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}
{{ c.function.name + '```' + c.function.arguments + '```' }}{% endfor %}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob("*.jinja"))}
SOURCES |= {"strict": STRICT, "textual": TEXTUAL}
TEMPLATES = {
    name: ChatTemplate(sources={"default": source}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    for name, source in SOURCES.items()
}

WORDS = st.text("abcdefgh \n\"'<{é", min_size=1, max_size=12).map(lambda text: f"w{text}w")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=3)
ARGUMENTS = st.one_of(
    OBJECTS.map(json.dumps),
    OBJECTS.map(json.dumps).map(lambda text: text[: len(text) // 2]),  # cut off
    OBJECTS,
    VALUES.map(json.dumps),
    st.sampled_from(
        ["", None, "null", "[1]", '"text"', "{'a': 1}", "no JSON", '{"a": "\\ud800"}', "[" * 500]
    ),
)
BOOLEANS: st.SearchStrategy[bool] = st.booleans()
CALLS = st.lists(st.tuples(st.sampled_from(["search", "write_file"]), ARGUMENTS), max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant's message as this server or OpenAI returns it, and the results of its calls."""
    calls: list[Any] = [
        {"id": f"call_{number:024x}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(draw(CALLS))
    ]
    content = draw(WORDS | st.sampled_from([None, ""]))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    is_old = draw(BOOLEANS)
    if is_old and len(calls) == 1:
        function = calls[0]["function"]
        return [
            message | {"function_call": function},
            {"role": "function", "name": function["name"], "content": draw(WORDS)},
        ]
    has_calls = draw(BOOLEANS)
    if calls or has_calls:
        message["tool_calls"] = calls or draw(st.sampled_from([None, []]))
    if draw(BOOLEANS):
        message |= {"reasoning_content": draw(WORDS), "reasoning": None}
    if content and draw(BOOLEANS):
        message["content"] = [{"type": "output_text", "text": content, "annotations": []}]
    if not content and not calls and draw(BOOLEANS):
        message["refusal"] = draw(WORDS)
    extra: Any = st.sampled_from(
        [{}, {"refusal": None, "audio": None, "annotations": [], "function_call": None}]
    )
    results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(WORDS)} for call in calls]
    return [draw(extra) | message, *results]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for role in draw(st.sampled_from([[], ["system"], ["developer"], ["system", "developer"]])):
        messages.append({"role": role, "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 2))):
        messages += [{"role": "user", "content": draw(WORDS)}, *draw(answers())]
    return messages


def said(messages: list[dict[str, Any]]) -> list[str]:
    """Every text that a prompt must have, without blanks."""
    texts = []
    for message in messages:
        content = message.get("content") or message.get("refusal") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts]
        calls = [*(message.get("tool_calls") or ()), {"function": message.get("function_call") or {}}]
        texts += [call["function"].get("name", "") for call in calls]
    return ["".join(text.split()) for text in texts]


@pytest.mark.parametrize("name", default(TEMPLATES, 13))
@settings(max_examples=15, deadline=None)
@given(messages=conversations())
def test_every_answer_is_taken_back_and_every_text_shown(name: str, messages: list[dict[str, Any]]) -> None:
    prompt = "".join(render_chat(messages, TEMPLATES[name]).split())
    for text in said(messages):
        assert text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt, (text, prompt)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", ["developer", "function", "tool", "system", "wizard"])
def test_a_message_in_any_role_is_shown_or_refused(name: str, role: str) -> None:
    for messages in (
        [{"role": role, "content": "Be short."}, {"role": "user", "content": "hello"}],
        [{"role": "user", "content": "hello"}, {"role": role, "content": "Be short."}],
        [
            {"role": "system", "content": "Sir."},
            {"role": role, "content": "Be short."},
            {"role": "user", "content": "hello"},
        ],
    ):
        try:
            prompt = render_chat(messages, TEMPLATES[name])
        except ChatTemplateError as error:
            assert role not in ("developer", "system"), error
        else:
            assert all(message["content"] in prompt for message in messages)


def test_a_developer_is_the_system_unless_the_template_knows_one() -> None:
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hello"}]
    as_system = [messages[0] | {"role": "system"}, messages[1]]
    for source in TEMPLATES.values():
        assert render_chat(messages, source) == render_chat(as_system, source)
    knows = "{% for m in messages %}{{ 'D:' if m.role == 'developer' else 'o:' }}{{ m.content }} {% endfor %}"
    assert render_chat(messages, knows) == "D:Be short. o:hello "


LATE = [  # a conversation, and what the strict template shows; s and d are instructions, c a call, t its result
    ("sus", "S:0 U:1 2"),
    ("susu", "S:0 U:1 U:2 3"),
    ("suasu", "S:0 U:1 A:2 U:3 4"),
    ("suas", "S:0 U:1 A:2 U:3"),
    ("udau", "U:0 1 A:2 U:3"),
    ("suacstau", "S:0 U:1 A:2 C:c3 T:5 U:4 A:6 U:7"),
    ("ssuddau", "S:0 1 U:2 3 4 A:5 U:6"),
    ("s", "S:0"),
    ("uu", "U:0 U:1"),
]


@pytest.mark.parametrize(("roles", "shown"), LATE)
def test_a_late_system_message_is_told_by_the_user_where_it_stands(roles: str, shown: str) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = []
    for number, role in enumerate(roles):
        if role == "c":
            call = {"id": f"call_{number}", "type": "function", "function": {"name": f"c{number}"}}
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            messages.append({"role": names[role], "content": str(number)})
        if role == "t":
            messages[-1]["tool_call_id"] = "call_3"
    assert "".join(render_chat(messages, STRICT).split()) == shown.replace(" ", "")


NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('system') }}{% endif %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{{ m.role[0] }}:{{ m.content }}
{% endfor %}"""


@pytest.mark.parametrize(
    ("roles", "shown"),
    [
        ("s", "u:0"),
        ("su", "u:0 1"),
        ("sua", "u:0 1 a:2"),
        ("uu", "u:0 1"),
        ("uuaau", "u:0 1 a:2 3 u:4"),
        ("suaus", "u:0 1 a:2 u:3 4"),
        ("suasas", "u:0 1 a:2 u:3 a:4 u:5"),
        ("sa", "u:0 a:1"),
        ("au", "u: a:0 u:1"),
        ("aau", "u: a:0 1 u:2"),
        ("asu", "u: a:0 u:1 2"),
    ],
)
def test_user_and_assistant_take_turns_if_the_template_wants_it(roles: str, shown: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(number)} for number, role in enumerate(roles)]
    assert render_chat(messages, NO_SYSTEM).split() == shown.split()


@pytest.mark.parametrize("roles", ["su", "u", "us", "sa", "uact", "uast"])
def test_every_form_of_a_long_conversation_takes_linear_work(roles: str) -> None:
    """Joined one after the other, 8,000 texts of 500 characters would be copied 16 GB."""
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    made: list[dict[str, Any]] = []
    call = {"id": "call_1", "function": {"name": "f", "arguments": {}}}
    for number in range(8000):
        role = roles[number % len(roles)]
        made.append({"role": names[role], "content": "x" * 500})
        if role == "c":
            made[-1]["tool_calls"] = [call]
    begin = time.thread_time()
    for form in islice(forms(made, knows_developer=False), 40):
        assert sum(len(each["content"] or "") for each in form) >= 4_000_000
    assert time.thread_time() - begin < 20


def test_arguments_are_json_or_the_text_that_they_are() -> None:
    assert parsed_arguments('{"a": [1, null]}') == {"a": [1, None]}
    for nothing in ("", " ", None, "null", "{}"):
        assert parsed_arguments(nothing) == {}
    for text in ('{"text":"I am a', '{"a": "\\ud83d"}', "[" * 100 + "]" * 100, "9" * 5000, "{'a': 1}"):
        assert parsed_arguments(text) == text
    assert parsed_arguments('{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}
    call = {"id": "call_1", "function": {"name": "write", "arguments": '{"text":"I am a'}}
    (message,) = normalised([{"role": "assistant", "tool_calls": [call]}])
    shown = [
        each[0]["tool_calls"][0]["function"]["arguments"]
        for each in forms([message], knows_developer=False)
        if "tool_calls" in each[0]
    ]
    assert shown[0] == '{"text":"I am a' and {"arguments": '{"text":"I am a'} in shown


def test_a_template_that_always_drops_a_text_is_refused_and_says_where() -> None:
    source = "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"drops the text of messages\[1\], whose role is 'critic'"):
        render_chat([{"role": "user", "content": "x"}, {"role": "critic", "content": "y"}], source)


def test_a_template_that_changes_texts_is_no_reason_to_refuse() -> None:
    messages = [
        {"role": "system", "content": "  Be /no_think brief.\n"},
        {"role": "user", "content": "one\n\ttwo"},
        {"role": "assistant", "content": "<think>hm</think>\n\nthree"},
        {"role": "user", "content": ' " '},
    ]
    source = (
        "{% for m in messages %}{{ (m.content.split('</think>')[-1] | replace('/no_think', '')"
        " | upper | trim) | tojson }}{% endfor %}"
    )
    assert render_chat(messages, source) == '"BE  BRIEF.""ONE\\n\\tTWO""THREE""\\""'
