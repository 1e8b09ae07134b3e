"""Tool calls are read in every form in which models write them, whatever values they hold and however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.call_forms import FORMS, HARMONY, LEFT_OPEN, SCHEMAS, TAGGED, obj
from tests.support.operations import calls_of
from tests.support.profiles import examples
from xla_engine.text.parsers.chats import TOOL_PARSERS
from xla_engine.text.parsers.formats import plain, think
from xla_engine.text.parsers.scan import Content, Event, Message, Parser, Reasoning, ToolStart, message_of

MARKS = (
    *("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<function=now>", "</function>", "</parameter>"),
    *("<parameter=city>", "<parameter=x>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *(
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|start|>assistant",
        "<|tool_call|>",
        "<|eom_id|>",
    ),
    *(
        "```",
        "```json\n",
        "\n```\n",
        '{"name": "now", "arguments": {}}',
        "[now()]",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
    ),
    *("</parameter>\n</function>\n</tool_call>", "</parameter>\n</function>\n</tool_call>\nand so on"),
    *(
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ", ",
        ": ",
        "functools[",
        "é",
        "\n",
        "\t",
        "<",
        "🙂",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</arg_value></tool_call>", '"""', "'''"),
    *(
        "<arg_key>city</arg_key><arg_value>",
        "<tool_call>now</tool_call>",
        "\n<parameter=days>\n",
        "\n</function>\n",
    ),
)


values = st.lists(st.sampled_from((*MARKS, "see", "here", " ")), max_size=6).map("".join)
arguments = st.fixed_dictionaries({}, optional={"city": values, "note": values, "days": st.integers(-9, 99)})


def in_pieces(parser: Parser, text: str, sizes: Iterator[int]) -> Message:
    message, place = Message(), 0
    while place < len(text):
        size = next(sizes)
        message.add(parser.feed(text[place : place + size]))
        place += size
    message.add(parser.finish())
    return message


def cuts(data: st.DataObject) -> Iterator[int]:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
    while True:
        yield from sizes


def parser_of(form: str, schemas: Mapping[str, Any] = SCHEMAS) -> Parser:
    return TOOL_PARSERS["harmony" if form in HARMONY else "json"](schemas)


@pytest.mark.parametrize("form", [*FORMS, *HARMONY])
@given(given_arguments=arguments, data=st.data())
@settings(max_examples=examples(4, 200), deadline=None)
def test_a_call_is_read_in_every_form_with_any_text_in_its_values(
    form: str, given_arguments: dict[str, Any], data: st.DataObject
) -> None:
    text = {**FORMS, **HARMONY}[form]("get_weather", given_arguments)
    whole_end, whole_call = "</parameter>\n</function>", "<function=now>\n</function>"
    shown = list(map(str, given_arguments.values()))
    if form.startswith(
        ("qwen3_coder", "minimax", "minicpm")
    ):  # an end with a call after it has only one reading
        assume(not any(whole_end in each and whole_call in each for each in shown))
        assume(not any(LEFT_OPEN.search(each) for each in shown))
    if form in ("minimax", "minicpm"):  # a model may have put a value on lines of its own
        assume(not any(each[:1] == each[-1:] == "\n" for each in shown))
    if form.startswith("glm"):
        assume(not any("</arg_value>" in each and "now</tool_call>" in each for each in shown))
    found = message_of(parser_of(form), text)
    calls = [(name, json.loads(each)) for name, each in found.calls]
    assert calls[-1:] == [("get_weather", given_arguments)], text
    assert [name for name, _ in calls[:-1]] in ([], ["now"]) and (found.content, found.reasoning) == ("", "")
    assert in_pieces(parser_of(form), text, cuts(data)) == found
    assert in_pieces(parser_of(form), text, iter(lambda: 1, 0)) == found


PROSE = (
    "Let me look.",
    "I call it: ",
    "Sure!\n",
    "(once)",
    "then",
    "\n\n",
    " ",
    "a < b",
    "1. ",
    "x",
    "<b>",
    "it's",
)
prose = st.lists(st.sampled_from(PROSE), max_size=4).map("".join)
DATA = (
    '{"a": 1}',
    "[1, 2]",
    '{"name": "Ann", "arguments": {}}',
    '["now"]',
    "```python\nf(x)\n```",
    "{x}",
    "f[0]",
)


@pytest.mark.parametrize("form", FORMS)
@given(before=prose, after=prose, count=st.integers(1, 3), data=st.data())
@settings(max_examples=examples(3, 100), deadline=None)
def test_several_calls_are_read_with_text_around_them(
    form: str, before: str, after: str, count: int, data: st.DataObject
) -> None:
    written = "\n".join([FORMS[form]("get_weather", {"city": "Paris"})] * count)
    text = f"{before}\n{written}\n{after}"
    found = message_of(parser_of(form), text)
    calls = [json.loads(each) for name, each in found.calls if name == "get_weather"]
    assert calls == [{"city": "Paris"}] * count and found.content == before.rstrip() + after.strip() + (
        after[len(after.rstrip()) :] if after.strip() else ""
    )
    assert in_pieces(parser_of(form), text, cuts(data)) == found


@pytest.mark.parametrize("form", FORMS)
@given(before=prose, after=prose, city=values, data=st.data())
@settings(max_examples=examples(3, 100), deadline=None)
def test_a_call_of_no_offered_tool_is_content_to_the_letter(
    form: str, before: str, after: str, city: str, data: st.DataObject
) -> None:
    written = FORMS[form]("get_weather", {"city": city.replace("now", "later")}).replace("now", "then")
    text = before + written + after
    schemas = {"search": {}, "get_weather_of": {}}
    assert message_of(parser_of(form, schemas), text) == Message(text)
    assert in_pieces(parser_of(form, schemas), text, cuts(data)) == Message(text)


def test_if_no_tool_is_known_only_a_mark_makes_a_call() -> None:
    for form, write in FORMS.items():
        text = write("get_weather", {"city": "x"})
        found = message_of(parser_of(form, {}), text)
        opened = (
            "<t",
            "<|",
            "<function_call>",
            "<｜",
            "[TOOL_CALLS]",
            "```tool",
            "```xml",
            "functools",
            "<mini",
        )
        assert bool(found.calls) == text.lstrip().startswith(opened)
        assert found.calls or found == Message(text)


@given(parts=st.lists(st.sampled_from((*PROSE, *DATA, *MARKS)), max_size=12), data=st.data())
@settings(max_examples=examples(60, 4000), deadline=None)
@pytest.mark.parametrize("name", ["json", "harmony", "think"])
def test_every_cut_of_any_text_gives_the_same_message(
    name: str, parts: list[str], data: st.DataObject
) -> None:
    def parser() -> Parser:
        if name == "think":
            return think(TOOL_PARSERS["json"](SCHEMAS), begun=False, may_call=True)
        return TOOL_PARSERS[name](SCHEMAS)

    text = "".join(parts)
    found = message_of(parser(), text)
    assert in_pieces(parser(), text, cuts(data)) == found
    if name == "json" and not found.calls:
        assert found == Message(text)


CALL = obj("get_weather", {"city": "Paris"})
DESCRIPTION = {"name": "get_weather", "description": "weather", "parameters": SCHEMAS["get_weather"]}


@pytest.mark.parametrize(
    "text",
    [
        f"call = {CALL}",
        f"`{CALL}`",
        f'"{CALL}"',
        f'{{"examples": [{CALL}]}}',
        f'[{{"a": 1}}, {CALL}]',
        f"```python\ncall = {CALL}\nprint(call)\n```",
        f"```python\ndef f():\n    return [\n        {CALL},\n    ]\n```",
        json.dumps(DESCRIPTION),
        json.dumps([{"type": "function", "function": DESCRIPTION}]),
        json.dumps({"name": "get_weather", "parameters": SCHEMAS["get_weather"]}),
        '{"name": "get_weather", "city": "Paris"}',
        '{"name": "get_weather"}',
        '{"name": "get_weather", "arguments": {"city": "Par',
        '{"name": "get_weather", "arguments": {"city": "Paris"',
        '<tool_call>{"name": "get_weather"',
        '<tool_call>{"name": "get_weather", "arguments": "Paris"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        "<tool_call></tool_call>",
        "<function=get_weather>",
        "see [get_weather](https://example.org) and get_weather(city)",
    ],
)
def test_a_text_about_a_call_is_content(text: str) -> None:
    for sizes in (iter(lambda: 1, 0), iter(lambda: 1000, 0)):
        assert in_pieces(parser_of("json"), text, sizes) == Message(text)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
        (r'{"city": "\d+\.\w it\'s"}', {"city": r"\d+\.\w it's"}),
        ('{"city": "x", "days": None, "note": True,}', {"city": "x", "days": None, "note": True}),
        ("{'city': 'a \"b\" it\\'s'}", {"city": 'a "b" it\'s'}),
        ('"{\\"city\\": \\"x\\"}"', {"city": "x"}),
        ("null", {}),
        ('""', {}),
    ],
)
def test_slips_in_arguments_that_have_one_meaning_are_mended(written: str, expected: dict[str, Any]) -> None:
    (call,) = message_of(parser_of("json"), f'{{"name": "get_weather", "arguments": {written}}}').calls
    assert json.loads(call[1]) == expected


def test_arguments_that_are_json_are_passed_on_as_they_were_written() -> None:
    written = '{ "city":"\\u0050aris" ,\n "days" : 1.50e0 }'
    for text in (
        f'{{"name": "get_weather", "arguments": {written}}}',
        f"[TOOL_CALLS]get_weather[ARGS]{written}",
    ):
        assert message_of(parser_of("json"), text) == Message(calls=[["get_weather", written]])


def shown(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content | Reasoning))


@given(text=st.lists(st.sampled_from((*PROSE, *DATA)), max_size=12).map("".join))
@settings(max_examples=examples(40, 2000), deadline=None)
def test_content_is_not_held_back(text: str) -> None:
    """Only what may still become a call is: blanks, the beginning of a mark or name, JSON until it shows that it is
    none."""
    parser, seen = parser_of("json"), ""
    for place, character in enumerate(text, 1):
        seen += shown(parser.feed(character))
        held = text[len(seen) : place].strip()
        assert text.startswith(seen)
        assert (
            not held
            or held[0] in "<[{`"
            or held in "functools"
            or any(name.startswith(held) for name in SCHEMAS)
        )
        assert len(held) <= len('```python{"name": "Ann"')
    assert seen + shown(parser.finish()) == text


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('{"city": "Par', ""),
        ('{"name": "Ann", "ag', ""),
        ('[{"b', ""),
        ("[1", ""),
        ("```python\nx = 1", ""),
        ("<b", ""),
        ("a <tool", " <tool"),
        ('{"name": "get', '{"name": "get'),
    ],
)  # fmt: skip
def test_what_is_held_back(text: str, held: str) -> None:
    parser = parser_of("json")
    seen = "".join(shown(parser.feed(character)) for character in text)
    assert seen + held == text


@pytest.mark.parametrize("form", [name for name in FORMS if name not in ("hermes without an end",)])
def test_a_call_is_emitted_before_the_answer_ends(form: str) -> None:
    """A value in tags may hold the end of a call, so such a call is certain when the answer ends or another begins."""
    parser, text = parser_of(form), FORMS[form]("get_weather", {"city": "Paris"})
    events = parser.feed(text)
    assert any(isinstance(event, ToolStart) for event in events) != form.startswith(TAGGED)


HOSTILE = (
    *(
        "[",
        "{",
        "{{",
        '{"name": "get_weather", "arguments": ',
        '{"name":"get_weather","arguments":\n',
        "<tool_call>{",
    ),
    *(
        "```",
        "\n",
        "a",
        '"',
        "\\",
        '["',
        "<function=get_weather><parameter=city>",
        "</parameter></function>",
        "{'a':",
    ),
    *(
        "<function=get_weather><parameter=a>1</parameter></function>x",
        "functools",
        "<|end|>",
        "[now(",
        "1",
        "<tool",
    ),
    *(
        '{"tool_calls":[',
        "<think>",
        "<|channel|>commentary to=functions.now<|message|>{",
        CALL,
        "to=",
        "now[ARGS]{",
    ),
    *(
        "<arg_key>city</arg_key><arg_value>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>",
        "<function=get_weather>\n<parameter=city>\nx\n<parameter=days>\n",
        "<function=get_weather>\n<parameter=city>\nx\n</function>\n",
        "\n<parameter=days>\n",
        "x\n</function>\n",
        '"""',
        "[get_weather('''a",
        "[get_weather(1, ",
    ),
)


@pytest.mark.parametrize("name", ["json", "harmony"])
@pytest.mark.parametrize(
    "before", ["", '{"name": "now", "arguments": {"x": "', "<function=now><parameter=x>"]
)
def test_the_work_is_linear_in_the_text(name: str, before: str) -> None:
    """Calls of functions, for text that comes a token at a time."""
    for part in HOSTILE:
        text = before + part * (1500 // len(part))

        def parse(text: str = text) -> None:
            in_pieces(TOOL_PARSERS[name](SCHEMAS), text, iter(lambda: 4, 0))

        assert calls_of(parse, 100 * len(text)) <= 100 * len(text), part


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_in_reasoning_that_does_not_end_is_one(begun: bool) -> None:
    text = f"hm <tool_call>\n{CALL}\n</tool_call>"

    def parser() -> Parser:
        return think(TOOL_PARSERS["json"](SCHEMAS), begun=begun, may_call=True)

    opening = "" if begun else "<think>"
    for sizes in (iter(lambda: 1, 0), iter(lambda: 1000, 0)):
        found = in_pieces(parser(), opening + text, sizes)
        assert found == Message("", "hm ", [["get_weather", '{"city": "Paris"}']])
    assert message_of(parser(), f"{opening}{text}</think>so") == Message("so", text)
    assert message_of(think(plain(), begun=begun), opening + text) == Message("", text)


def test_harmony_reads_calls_in_its_messages_too() -> None:
    text = f"<|channel|>analysis<|message|>hm <|end|> hm<|end|><|start|>assistant<|channel|>final<|message|>So: {CALL}"
    assert message_of(parser_of("harmony"), text) == Message(
        "So:", "hm <|end|> hm", [["get_weather", '{"city": "Paris"}']]
    )
    assert message_of(parser_of("harmony"), "no marks") == Message("no marks")
    unknown = "<|channel|>commentary to=functions.other<|message|>{}<|call|>"
    assert message_of(parser_of("harmony"), unknown) == Message(unknown)


@pytest.mark.parametrize("last", ["</parameter>\n", ""])
@pytest.mark.parametrize("around", ["<tool_call>\n{}\n</tool_call>", "{}"])
@given(
    lines=st.lists(
        st.sampled_from(("Paris", "a < b", "", "<b>", "  x = 1", '{"a": 1}')), min_size=1, max_size=4
    )
)
@settings(max_examples=examples(5, 200), deadline=None)
def test_a_missing_closing_tag_ends_a_value(around: str, last: str, lines: list[str]) -> None:
    """Before the next parameter, or before the end of the call; also in one call of several."""
    assume("".join(lines).strip())
    city = "\n".join(lines)
    call = f"<function=get_weather>\n<parameter=city>\n{city}\n<parameter=days>\n3\n{last}</function>"
    expected = ["get_weather", {"city": city, "days": 3}]
    written = around.format(call)
    other = FORMS["qwen3_coder"]("now", {})
    for text, count in ((written, 1), (f"{written}\n{written}", 2), (f"{written}\n{other}", 1)):
        for sizes in (iter(lambda: 1000, 0), iter(lambda: 1, 0), iter(lambda: 7, 0)):
            found = in_pieces(parser_of("json"), text, sizes)
            calls = [[name, json.loads(each)] for name, each in found.calls]
            assert calls[:count] == [expected] * count and found.content == "", text
            assert [name for name, _ in calls[count:]] == ["now"] * (count == 1 and text != written)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[get_weather('Paris')]", {"city": "Paris"}),
        ("[get_weather('Paris', days=2)]", {"city": "Paris", "days": 2}),
        ("[get_weather('Paris', '', 2,)]", {"city": "Paris", "note": "", "days": 2}),
        ('[get_weather(None, """a "b" \'c\'\nd""")]', {"city": None, "note": "a \"b\" 'c'\nd"}),
        ("[get_weather(city='''it's''', note='')]", {"city": "it's", "note": ""}),
        ('[get_weather(city="""""")]', {"city": ""}),
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>", {"city": "Paris"}),
        (
            "<tool_call>get_weather\n<arg_key>days</arg_key><arg_value> 3 </arg_value>\n</tool_call>",
            {"days": 3},
        ),
        ("<tool_call>get_weather\n</tool_call>", {}),
        ("[get_weather(['a', {'b': 1}])]", {"city": ["a", {"b": 1}]}),
    ],
)
def test_arguments_without_names_or_ends_have_those_of_the_schema(
    text: str, expected: dict[str, Any]
) -> None:
    for sizes in (iter(lambda: 1000, 0), iter(lambda: 1, 0)):
        found = in_pieces(parser_of("json"), text, sizes)
        assert [json.loads(each) for _, each in found.calls] == [expected] and not found.content


@pytest.mark.parametrize(
    "text",
    [
        "[get_weather('a', 'b', 1, 2)]",
        "[get_weather(city='a', 'b')]",
        "[get_weather('a', city='b')]",
        "[get_weather(a, b)]",
        "[now(1)]",
        "<tool_call>get_weather <arg_key>city",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        "<function=get_weather>\n<parameter=city>\nsee\n</function>\nand so on",
        "<function=get_weather>\n<parameter=city>\nsee\n<parameter=days>\n3",
    ],
)
def test_what_has_no_one_meaning_is_content(text: str) -> None:
    for sizes in (iter(lambda: 1, 0), iter(lambda: 1000, 0)):
        assert in_pieces(parser_of("json"), text, sizes) == Message(text)
