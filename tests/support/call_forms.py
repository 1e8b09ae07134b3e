"""Tool calls as models of each form write them: `FORMS` and `HARMONY`, functions of a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "note": {"type": "string"}, "days": {"type": "integer"}},
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}
ORDER = tuple(SCHEMAS["get_weather"]["properties"])


def obj(name: str, arguments: Mapping[str, Any], key: str = "arguments", **more: Any) -> str:
    return json.dumps({**more, "name": name, key: arguments}, ensure_ascii=False)


def tags(name: str, arguments: Mapping[str, Any]) -> str:
    values = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{''.join(values)}</function>"


def nested(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}})


def python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"


def positional(name: str, arguments: Mapping[str, Any]) -> str:
    """Values without names as far as the schema's order allows."""
    first = next((place for place, key in enumerate(ORDER) if key not in arguments), len(ORDER))
    written = [
        json.dumps(value) if key in ORDER[:first] else f"{key} = {json.dumps(value)}"
        for key, value in sorted(arguments.items(), key=lambda each: ORDER.index(each[0]))
    ]
    return f"{name}({', '.join(written)})"


def triple(value: Any, quote: str = '"') -> str:
    """A value as Python writes it, with texts in triple quotes."""
    if not isinstance(value, str):
        return json.dumps(value)
    value = re.sub(f"{quote}(?={quote}|$)", rf"\\{quote}", value.replace("\\", "\\\\"))
    return 3 * quote + value + 3 * quote


def in_triple(arguments: Mapping[str, Any], quote: str = '"') -> str:
    return "{" + ", ".join(f'"{key}": {triple(value, quote)}' for key, value in arguments.items()) + "}"


def pairs(name: str, arguments: Mapping[str, Any], between: str = "\n") -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    written = (
        f"<arg_key>{key}</arg_key>{between}<arg_value>{text}</arg_value>" for key, text in texts.items()
    )
    return f"<tool_call>{between.join([name, *written, ''])}</tool_call>"


def gemma(value: Any) -> str:
    """A value in Gemma 4's form: keys are bare, and texts stand between marks."""
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
        case str():
            return f'<|"|>{value}<|"|>'
    return json.dumps(value)


def dsml(name: str, arguments: Mapping[str, Any], word: str) -> str:
    """A call in the tags of DeepSeek V3.2 (`function_calls`) and V4 (`tool_calls`)."""
    values = (
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{"".join(values)}</｜DSML｜invoke>'
    return f"<｜DSML｜{word}>\n{call}\n</｜DSML｜{word}>"


# A new parameter or the end of a call at the beginning of a line: with no closing tag before it, the value's end.
LEFT_OPEN = re.compile(r"\S\s*\n\s*(<parameter=(city|days)>|</function>)")
TAGGED = ("qwen3_coder", "glm", "deepseek v3.2", "deepseek v4", "minimax", "minicpm")
Write = Callable[[str, Mapping[str, Any]], str]
FORMS: dict[str, Write] = {
    "hermes": lambda n, a: f"<tool_call>\n{obj(n, a)}\n</tool_call>",
    "hermes without an end": lambda n, a: f"<tool_call>{obj(n, a)}",
    "hermes without a beginning": lambda n, a: f"{obj(n, a)}\n</tool_call>",
    "hermes, a bracket short": lambda n, a: f"<tool_call>\n{obj(n, a)[:-1]}\n</tool_call>",
    "hermes, a bracket too many": lambda n, a: f"<tool_call>\n{obj(n, a)}}}\n</tool_call>",
    "hermes, two brackets": lambda n, a: f"<tool_call>\n{{{obj(n, a)}}}\n</tool_call>",
    "hermes, arguments in text": lambda n, a: f"<tool_call>{obj(n, json.dumps(a))}</tool_call>",
    "hermes, name first": lambda n, a: f"<tool_call>{n}\n{json.dumps(a)}</tool_call>",
    "tools": lambda n, a: f"<tools>\n{obj(n, a)}\n</tools>",
    "function_call": lambda n, a: f"<function_call> {obj(n, a)} </function_call>",
    "bare": obj,
    "bare parameters": lambda n, a: obj(n, a, "parameters"),
    "bare args": lambda n, a: obj(n, a, "args"),
    "bare input": lambda n, a: obj(n, a, "input", type="tool_use", id="toolu_1"),
    "bare, nested": nested,
    "bare message": lambda n, a: f'{{"tool_calls": [{nested(n, a)}]}}',
    "bare, single quotes": lambda n, a: str({"name": n, "arguments": a}) if "\\" not in str(a) else obj(n, a),
    "fence": lambda n, a: f"```json\n{obj(n, a)}\n```",
    "fence without a language": lambda n, a: f"```\n{obj(n, a)}\n```",
    "fence of a call": lambda n, a: f"```tool_call\n{obj(n, a)}\n```",
    "fence of tags": lambda n, a: f"```xml\n<tool_call>\n{obj(n, a)}\n</tool_call>\n```",
    "fence of a list": lambda n, a: f"```json\n[\n  {obj(n, a)}\n]\n```",
    "qwen3_coder": lambda n, a: f"<tool_call>\n{tags(n, a)}\n</tool_call>",
    "qwen3_coder without a beginning": lambda n, a: f"{tags(n, a)}\n</tool_call>",
    "qwen3_coder, bare": tags,
    "llama3": lambda n, a: f"<|python_tag|>{obj(n, a, 'parameters')}",
    "llama3, two with a semicolon": lambda n, a: f"{obj('now', {}, 'parameters')}; {obj(n, a, 'parameters')}",
    "llama3, a function": lambda n, a: f"<function={n}>{json.dumps(a)}</function>",
    "llama3, Python": lambda n, a: f"[{python(n, a)}]",
    "llama3, Python without names": lambda n, a: f"[{positional(n, a)}]",
    "Python in triple quotes": lambda n, a: (
        f"[{n}({', '.join(f'{key}={triple(value, chr(39))}' for key, value in a.items())})]"
    ),
    "hermes, triple quotes": lambda n, a: (
        f'<tool_call>\n{{"name": "{n}", "arguments": {in_triple(a)}}}\n</tool_call>'
    ),
    "bare, triple quotes": lambda n, a: f'{{"name": "{n}", "arguments": {in_triple(a)}}}',
    "glm": pairs,
    "glm, without line breaks": lambda n, a: pairs(n, a, ""),
    "mistral": lambda n, a: f"[TOOL_CALLS][{obj(n, a)}]",
    "mistral without a mark": lambda n, a: f"[{obj(n, a)}]",
    "mistral, new": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}",
    "mistral, with an id": lambda n, a: f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(a)}",
    "mistral, new without a mark": lambda n, a: f"{n}[ARGS]{json.dumps(a)}",
    "granite": lambda n, a: f"<|tool_call|>[{obj(n, a)}]",
    "phi4": lambda n, a: f"<|tool_call|>[{obj(n, a)}]<|/tool_call|>",
    "phi4 mini": lambda n, a: f"functools[{obj(n, a)}]",
    "lfm2": lambda n, a: f"<|tool_call_start|>[{python(n, a)}]<|tool_call_end|>",
    "gemma": lambda n, a: f"```tool_code\n{python(n, a)}\n```",
    "deepseek v3": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek v3.1": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek v3.2": lambda n, a: dsml(n, a, "function_calls"),
    "deepseek v4": lambda n, a: "\n\n" + dsml(n, a, "tool_calls"),
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{gemma(a)}<tool_call|>",
    "gemma4, stopped at the result": lambda n, a: (
        f"<|tool_call>call:now{{}}<tool_call|><|tool_call>call:{n}{gemma(a)}<tool_call|><|tool_response>"
    ),
    "apertus": lambda n, a: f"<|tools_prefix|>[{json.dumps({n: a}, ensure_ascii=False)}]<|tools_suffix|>",
    "minimax": lambda n, a: (
        f'<minimax:tool_call>\n<invoke name="{n}">\n'
        + "".join(
            f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
            for key, value in a.items()
        )
        + "</invoke>\n</minimax:tool_call>"
    ),
    "minicpm": lambda n, a: (
        f'<function name="{n}">'
        + "".join(
            f'<param name="{key}">{f"<![CDATA[{value}]]>" if isinstance(value, str) else json.dumps(value)}</param>'
            for key, value in a.items()
        )
        + "</function>"
    ),
    "kimi k2": lambda n, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{json.dumps(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}  # fmt: skip
HARMONY: dict[str, Write] = {
    "harmony": lambda n, a: (
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
    ),
    "harmony, recipient first": lambda n, a: (
        f"<|start|>assistant to=functions.{n}<|channel|>commentary json<|message|>{json.dumps(a)}<|call|>"
    ),
    "harmony without an end": lambda n, a: (
        f"<|channel|>commentary to=functions.{n}<|message|>{json.dumps(a)}"
    ),
}
