"""Strict tools in each format, with a tokenizer that has the format's tokens.

A call that fits is accepted as the model writes it, whatever tokens spell it; a call that does not fit is not; and
text without calls is free.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.call_forms import gemma
from tests.support.format_models import end_ids, format_tokenizer
from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.constraint_forms import ConstraintError, ConstraintForm, accepted_form
from xla_engine.text.grammar import Grammars
from xla_engine.text.parsers.chats import Dialect, take_chat
from xla_engine.text.parsers.thoughts import THOUGHTS

pytest.importorskip("llguidance")

CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
}
GOOD, BAD = (
    {"city": "Paris", "days": 3},
    ({"city": "Paris", "days": 9}, {"city": "Paris", "days": 3, "x": 1}, {"city": 1}),
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}},
    {"type": "function", "function": {"name": "any.thing", "parameters": {"type": "object"}}},
]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FORMATS = ("hermes", "qwen3_coder", "glm", "llama3", "mistral", "deepseek", "kimi_k2", "gemma4", "harmony")


@cache
def grammars(name: str) -> Grammars:
    return Grammars(format_tokenizer(name), 4096, end_ids(name))


def constraint(name: str, **fields: Any) -> StructuredOutputsParams | None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    take_chat(body, Dialect(tools=name, reasoning="harmony" if name == "harmony" else None), None)
    given = body.get("structured_outputs")
    assert given is None or isinstance(given, StructuredOutputsParams)
    return given


def ids_of(name: str, text: str, draw: st.DataObject | None = None) -> list[int]:
    """The ids of a text, whose special tokens are tokens. draw: other text tokens than the usual ones."""
    tokenizer = format_tokenizer(name)
    ids = tokenizer.plain_ids(text)
    if draw is None:
        return ids
    found: list[int] = []
    for number in ids:
        data = tokenizer.token_bytes(number)
        if number in tokenizer.special_token_ids or len(data) == 1 or draw.draw(st.booleans()):
            found.append(number)
        else:
            found += [
                next(n for n in range(257) if tokenizer.token_bytes(n) == bytes([byte])) for byte in data
            ]
    return found


def accepted(name: str, params: StructuredOutputsParams, ids: list[int]) -> bool:
    """Whether the masks allow the ids one after the other, and the end after them."""
    matcher = grammars(name).matcher(params)
    ends = set(end_ids(name))
    for place, number in enumerate(ids):
        allowed = np.unpackbits(matcher.words().view(np.uint8), bitorder="little")
        if not allowed[number]:
            return number in ends and place == len(ids) - 1 and bool(allowed[list(ends)].any())
        matcher.push(number)
        if number in ends:
            return place == len(ids) - 1
    return bool(np.unpackbits(matcher.words().view(np.uint8), bitorder="little")[list(ends)].any())


def call(name: str, arguments: Any, *, function: str = "weather", style: int = 0) -> str:
    """A call as models of the format write it, in one of several styles."""
    text = json.dumps(arguments, separators=[(", ", ": "), (",", ":")][style % 2])
    given = f'{{"name": "{function}", "arguments": {text}}}'
    turned = f'{{ "arguments":{text} ,"name":\n"{function}"}}'
    if name == "hermes":
        return [
            f"<tool_call>\n{given}\n</tool_call>",
            f"<tool_call>{turned}</tool_call>",
            f"<tool_call>\n{given}",
        ][style % 3]
    if name == "qwen3_coder":
        members = list(arguments.items())[:: -1 if style % 2 else 1]
        parts = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in members
        ]
        return f"<tool_call>\n<function={function}>\n{''.join(parts)}</function>\n</tool_call>"
    if name == "glm":
        members = list(arguments.items())[:: -1 if style % 2 else 1]
        line = "" if style % 3 == 2 else "\n"  # GLM 4.7 writes no line breaks
        parts = [
            f"<arg_key>{key}</arg_key>{line}"
            f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>{line}"
            for key, value in members
        ]
        return f"<tool_call>{function}{line}{''.join(parts)}</tool_call>"
    if name == "llama3":
        given = given.replace("arguments", "parameters")
        return [given, f"<|python_tag|>{given}", f"<|python_tag|>{turned}<|eom_id|>"][style % 3]
    if name == "mistral":
        return [
            f"[TOOL_CALLS][{given}]",
            f"[TOOL_CALLS]{function}[ARGS]{text}",
            f"[TOOL_CALLS] [{turned}]</s>",
        ][style % 3]
    if name == "deepseek":
        begin, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        sep = "<｜tool▁sep｜>"
        return [
            f"{begin}function{sep}{function}\n```json\n{text}\n```{end}",
            f"{begin}{function}{sep}{text}{end}",
            f"{begin}{function}{sep}{text}{end}<｜end▁of▁sentence｜>",
        ][style % 3]
    if name == "kimi_k2":
        begin, end = (
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        )
        between = "<|tool_call_argument_begin|>"
        return [
            f"{begin}functions.{function}:0{between}{text}{end}",
            f"{begin} functions.{function}:0 {between} {text} {end}",
            f"{begin}functions.{function}:12{between}{text}{end}<|im_end|>",
        ][style % 3]
    if name == "gemma4":
        members = list(arguments.items())[:: -1 if style % 2 else 1]
        written = ",".join(f"{key}:{gemma(value)}" for key, value in members)
        done = f"<|tool_call>call:{function}{{{written}}}<tool_call|>"
        return [done, done + done, f"{done}<|tool_response>"][style % 3]
    to = f"to=functions.{function}"
    return [
        f"<|channel|>commentary {to} <|constrain|>json<|message|>{text}<|call|>",
        f" {to}<|channel|>commentary json<|message|>{text}<|call|>",
        f"{THOUGHT}<|channel|>commentary {to}<|message|>{text}<|call|>",
    ][style % 3]


STYLES = st.integers(0, 5)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(FORMATS), style=STYLES, days=st.integers(1, 7))
def test_a_call_that_fits_is_accepted_as_it_is_written(
    data: st.DataObject, name: str, style: int, days: int
) -> None:
    params = constraint(name)
    assert params is not None
    city = data.draw(
        st.sampled_from(["Paris", "", "São Paulo", "<tool_call>", '"', "a\nb", "to=functions.x"])
    )
    if name == "qwen3_coder" and "\n" in city:
        city = "x"
    text = call(name, {"city": city, "days": days}, style=style)
    if (
        data.draw(st.booleans())
        and name in ("hermes", "qwen3_coder", "glm", "mistral")
        and not (name == "hermes" and style % 3 == 2)
    ):
        text = (
            "Let me see. "
            + text
            + (call(name, {"q": [1, None]}, function="any.thing") if name != "mistral" else "")
        )
    assert accepted(name, params, ids_of(name, text, data)), text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("style", range(3))
def test_a_call_that_does_not_fit_is_not_accepted(name: str, style: int) -> None:
    params = constraint(name)
    assert params is not None
    assert accepted(name, params, ids_of(name, call(name, GOOD, style=style)))
    for arguments in BAD:
        assert not accepted(name, params, ids_of(name, call(name, arguments, style=style)))
    free: Any = {"x": [1], "city": 3}  # of a tool that is not strict
    assert accepted(name, params, ids_of(name, call(name, free, function="any.thing", style=style)))
    if name != "qwen3_coder" and not (name == "llama3" and style == 0):  # else it is text, not a call
        assert not accepted(name, params, ids_of(name, call(name, GOOD, function="other", style=style)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        '{"answer": 3}',
        "",
        "```json\n[1]\n```",
        "<think>so</think> done",
        '{"name": "Bob"}',
        "a < b {",
    ],
)
def test_text_without_calls_is_free(name: str, text: str) -> None:
    params = constraint(name)
    assert params is not None
    if name == "harmony":
        text = f"{THOUGHT.replace('Hm.', text)}<|channel|>final<|message|>{text}<|return|>"
    assert accepted(name, params, ids_of(name, text))


@pytest.mark.parametrize("name", ["hermes", "glm", "llama3", "mistral"])
@pytest.mark.parametrize(
    "text", ["{}", "```json\n{}\n```", "I call it: {}; done", '{{"name": "Bob"}} {}', "{0}\n{0}"]
)
def test_bare_calls_fit_too(name: str, text: str) -> None:
    """Models leave tags out, and the parser reads such calls."""
    params = constraint(name)
    assert params is not None
    for arguments, good in ((GOOD, True), (BAD[0], False), (BAD[1], False)):
        written = json.dumps({"name": "weather", "arguments": arguments})
        assert accepted(name, params, ids_of(name, text.format(written))) is good
    for free in (
        {"name": "weather", "description": "of a city"},
        {"name": "weather"},
        {"name": "any.thing", "arguments": 3},
    ):
        assert accepted(name, params, ids_of(name, text.format(json.dumps(free))))


def test_code_after_the_tag_of_llama_is_no_call() -> None:
    params = constraint("llama3")
    assert params is not None
    assert accepted(
        "llama3", params, ids_of("llama3", '<|python_tag|>brave_search.call(query="x")<|eom_id|>')
    )
    two = call("llama3", GOOD, style=0) + "; " + call("llama3", GOOD, style=0)
    assert accepted("llama3", params, ids_of("llama3", two))


def test_texts_of_an_enum_and_values_in_json_are_held_in_the_tags_of_glm() -> None:
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "required": ["unit"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    params = constraint("glm", tools=tools)
    assert params is not None
    for arguments, good in (
        ({"unit": "C"}, True),
        ({"unit": "K"}, False),
        ({"unit": "\nC"}, False),
        ({}, False),
        ({"unit": "F", "place": {"x": 1.5}}, True),
        ({"unit": "F", "place": None}, True),
        ({"unit": "F", "place": {"y": 1}}, False),
        ({"unit": "F", "other": 1}, False),
    ):
        text = call("glm", arguments, function="f")
        assert accepted("glm", params, ids_of("glm", text)) is good, text


def test_without_a_strict_tool_nothing_is_held() -> None:
    for name in FORMATS:
        loose = [{"type": "function", "function": {"name": "f", "parameters": CITY}}]
        assert constraint(name, tools=loose) is None
        assert constraint("none", tool_choice="none") is None


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}}}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strict", [False, True])
def test_with_a_format_the_answer_is_calls_or_has_the_format(name: str, strict: bool) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}, TOOLS[1]]  # type: ignore[dict-item]
    params = constraint(name, tools=tools, response_format=FORMAT)
    assert params is not None

    def answer(text: str) -> str:
        return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>" if name == "harmony" else text

    for style in range(3):
        assert accepted(name, params, ids_of(name, call(name, GOOD, style=style))), style
        bad = ids_of(name, call(name, {"city": "Paris", "days": 9}, style=style))
        assert accepted(name, params, bad) is not strict
    assert accepted(name, params, ids_of(name, answer('{"ok":true}')))
    for wrong in ("Hello", '{"ok":1}', '{"ok":true,"x":1}'):
        assert not accepted(name, params, ids_of(name, answer(wrong)))
    if name in ("hermes", "glm", "llama3", "mistral"):  # a call without tags
        bare = json.dumps({"name": "weather", "arguments": GOOD})
        assert accepted(name, params, ids_of(name, bare))


def test_what_the_whole_text_must_match_stays_so() -> None:
    """`structured_outputs` is of the text with its calls, and a format of any object is one, too."""
    for name in FORMATS:
        given = {"choice": ["<tool_call>x"]}
        body: Any = {"messages": [{"role": "user"}], "tools": TOOLS, "structured_outputs": given}
        take_chat(body, Dialect(tools=name), None)
        assert body["structured_outputs"] is given
    params = constraint("mistral", response_format={"type": "json_object"})
    assert params is not None
    assert accepted("mistral", params, ids_of("mistral", '{"any":1}'))
    assert not accepted("mistral", params, ids_of("mistral", "xyz"))


def test_channels_hold_a_format_in_the_final_message() -> None:
    """Also without tools: before, the format bound from the first token, and the parser saw no message."""
    params = constraint("harmony", tools=None, response_format=FORMAT)
    assert params is not None
    head = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
    assert accepted("harmony", params, ids_of("harmony", head + '{"ok":false}<|return|>'))
    assert not accepted("harmony", params, ids_of("harmony", head + "no<|return|>"))
    assert not accepted("harmony", params, ids_of("harmony", '{"ok":false}'))


@pytest.mark.parametrize(
    ("name", "reasoning"), [("hermes", "think"), ("gemma4", "gemma4"), ("mistral", "mistral")]
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_reasoning_comes_before_a_format(name: str, reasoning: str, tools: Any) -> None:
    """The model thinks freely, and then calls or answers in the format; whether the prompt has opened the reasoning
    or the model does."""
    body: dict[str, Any] = {"messages": [{"role": "user"}], "tools": tools, "response_format": FORMAT}
    _, reading = take_chat(body, Dialect(tools=name, reasoning=reasoning), None)
    params = SamplingParams.from_mapping(body)
    tags = THOUGHTS[reasoning]
    prompts = {
        "<assistant>": ("", f"{tags.opening}a {{b{tags.closing}\n", tags.opening + tags.closing),
        f"{tags.opening}\n": (f"a {{b{tags.closing}\n\n", tags.closing),
    }
    for prompt, thoughts in prompts.items():
        held = reading.sampling(params, prompt).structured_outputs
        assert held is not None
        for thought in thoughts:
            for text in ('{"ok":true}', call(name, GOOD)):
                good = tools is not None or text[0] == "{"
                assert accepted(name, held, ids_of(name, thought + text)) is good, (thought, text)
            assert not accepted(name, held, ids_of(name, thought + "no"))
    assert not accepted(name, held, ids_of(name, '{"ok":true}'))  # the reasoning must end first


def test_values_of_gemma_are_held_to_their_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "note": {"type": "string"}},
                "required": ["x"],
            },
        },
        "required": ["unit"],
    }
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    params = constraint("gemma4", tools=tools)
    assert params is not None
    for arguments, good in (
        ({"unit": "C"}, True),
        ({"tags": ["a,b", ""], "unit": "F", "days": None}, True),
        ({"unit": "F", "place": {"note": "a}", "x": -1.5}}, True),
        ({"unit": "K"}, False),
        ({}, False),
        ({"unit": "C", "days": 1.5}, False),
        ({"unit": "C", "tags": [1]}, False),
        ({"unit": "F", "place": {"note": "a"}}, False),
        ({"unit": "F", "other": 1}, False),
    ):
        text = call("gemma4", arguments, function="f")
        assert accepted("gemma4", params, ids_of("gemma4", text)) is good, text


def test_one_tools_schema_does_not_refuse_the_others() -> None:
    """Invalid schemas, those that no text fits and those that end a trial are left free; the others hold."""
    broken = [
        {"type": "objec"},
        {"enum": [-(2**63)]},
        {"type": "object", "properties": {"n": {"enum": []}}},
        {"type": "object", "properties": {"n": {"type": "string", "pattern": "(?=x)"}}},
        {"type": "object", "properties": {"n": {"minimum": 5, "maximum": 3}}, "required": ["n"]},
    ]
    tools = [
        TOOLS[0],
        *(
            {"type": "function", "function": {"name": f"f{n}", "strict": True, "parameters": s}}
            for n, s in enumerate(broken)
        ),
    ]
    for fields in ({}, {"tool_choice": "required"}):
        params = constraint("hermes", tools=tools, **fields)
        assert params is not None
        for good, arguments in ((True, GOOD), (False, BAD[0])):
            text = json.dumps({"name": "weather", "arguments": arguments}, separators=(",", ":"))
            text = text if fields else f"<tool_call>{text}</tool_call>"
            assert accepted("hermes", params, ids_of("hermes", text)) is good
        text = '{"name":"f0","arguments":{"x":1}}'
        assert accepted(
            "hermes", params, ids_of("hermes", text if fields else f"<tool_call>{text}</tool_call>")
        )
    named = constraint("hermes", tools=tools, tool_choice={"type": "function", "function": {"name": "f0"}})
    assert named is not None
    with pytest.raises(InvalidRequestError, match="Invalid type 'objec'"):
        grammars("hermes").matcher(named)


def test_tools_that_are_too_much_together_are_not_refused() -> None:
    """A forced call is; otherwise the calls are free, and a format still holds."""

    def too_much(form: ConstraintForm) -> str | None:
        text = form.body.get("lark_grammar", "")
        return "too much" if "arguments" in text and '"city"' in text else None

    for fields, kept in (({}, {"lark_grammar": "start: <[*]>*"}), ({"response_format": FORMAT}, None)):
        params = constraint("hermes", **fields)
        assert params is not None
        form = accepted_form(params, format_tokenizer("hermes").id_of, too_much)
        assert form.body == kept or form.body["json_schema"]["properties"] == {"ok": {"type": "boolean"}}
        assert "strict" in form.left[-1]
    forced = constraint("hermes", tool_choice="required")
    assert forced is not None
    with pytest.raises(ConstraintError, match="too much"):
        accepted_form(forced, format_tokenizer("hermes").id_of, too_much)
    free = StructuredOutputsParams(grammar="start: <[*]>*")
    assert accepted("hermes", free, ids_of("hermes", "<tool_call>any<|im_start|>"))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_has_no_arguments(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        params = constraint("hermes", tools=[tool], tool_choice=choice)
        assert params is not None
        for arguments, good in (("{}", True), ('{"a":1}', False), ("5", False)):
            text = f'{{"name":"f","arguments":{arguments}}}' if choice == "required" else arguments
            assert accepted("hermes", params, ids_of("hermes", text)) is good


def test_schemas_that_are_too_large_to_hold_are_not_refused() -> None:
    large = {"type": "object", "properties": {f"p{n}": {"enum": ["x" * 50]} for n in range(6000)}}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": large}}]
    for name in set(FORMATS) - {
        "qwen3_coder",
        "glm",
    }:  # which has 64 parameters at most, and leaves more free
        assert constraint(name, tools=tools) is None
