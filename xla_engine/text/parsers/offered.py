"""Tools as clients send them, turned into functions: custom tools, tools of other servers, and OpenAI's older form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.text.conversation import CUSTOM_INPUT
from xla_engine.text.parsers.scan import Event, ToolArguments, ToolStart
from xla_engine.utils.warn_once import warn_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """How a client sent its tools. custom: names of those whose input is a plain text. old: `functions`, to which the
    answer has `function_call`."""

    custom: frozenset[str] = frozenset()
    old: bool = False


def take_offered(body: dict[str, Any]) -> Offered:
    """Turn the tools of a body into functions, and `functions` and `function_call` into `tools` and `tool_choice`.

    Tools of kinds that only other servers have are left out, with a warning in the log. What is no tool at all stays,
    for an error that names it. Raises InvalidRequestError.
    """
    old = _take_functions(body)
    tools = body.get("tools")
    if not isinstance(tools, list):
        return Offered(old=old)
    found, custom = [], set[str]()
    for number, tool in enumerate(tools):
        if _is_kind(tool, "custom"):
            name, function = _custom(tool, number)
            custom.add(name)
            found.append({"type": "function", "function": function})
        elif _is_other(tool):
            warn_once(
                "tools of type %r are left out: the model can call functions and custom tools", tool["type"]
            )
        else:
            found.append(tool)
    if len(found) < len(tools) and not found:
        del body["tools"]
        body.pop("tool_choice", None)
    else:
        body["tools"] = found
        if isinstance(choice := body.get("tool_choice"), Mapping):
            body["tool_choice"] = _choice(choice)
    return Offered(custom=frozenset(custom), old=old)


def _take_functions(body: dict[str, Any]) -> bool:
    functions, choice = body.get("functions"), body.get("function_call")
    if functions:
        if not isinstance(functions, list) or body.get("tools"):
            raise InvalidRequestError("functions must be a list, without tools beside it; send tools alone")
        del body["functions"]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        body.setdefault("parallel_tool_calls", False)
    if functions and choice is not None:
        del body["function_call"]
        body["tool_choice"] = choice
    return bool(functions)


def _is_kind(tool: object, kind: str) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == kind


def _is_other(tool: object) -> bool:
    """Whether this is a tool of another kind than functions and custom tools."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind not in ("function", "custom") and "function" not in tool  # type: ignore[operator]


def _custom(tool: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """Name and function of a custom tool, in the form of a chat or of a response."""
    inner = tool.get("custom", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(f"tools [{number}] needs a name that is text")
    told = [
        text for text in (inner.get("description"), _grammar(inner.get("format"))) if isinstance(text, str)
    ]
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    description = {"description": "\n\n".join(told)} if told else {}
    return name, {"name": name, **description, "parameters": schema}


def _grammar(form: object) -> str | None:
    """What the model is told about the format of a custom tool's input."""
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else None
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    if not isinstance(definition, str) or not isinstance(grammar, Mapping):
        return None
    return f"The input has this form ({grammar.get('syntax', 'grammar')}):\n{definition}"


def _choice(choice: Mapping[str, Any]) -> object:
    """A `tool_choice` that names functions alone; "auto" if it names a tool that was left out."""
    if choice.get("type") == "custom":
        return {"type": "function", "function": choice.get("custom", choice)}
    if choice.get("type") != "allowed_tools":
        return "auto" if _is_other(choice) and "name" not in choice else choice
    inner = choice.get("allowed_tools", choice)
    if not isinstance(inner, Mapping) or not isinstance(tools := inner.get("tools"), list):
        return choice
    functions = [
        {"type": "function", "function": tool.get("custom", tool)} if _is_kind(tool, "custom") else tool
        for tool in tools
        if not _is_other(tool)
    ]
    if len(functions) < len(tools) and not functions:
        return "none"
    return {"type": "allowed_tools", "allowed_tools": {**inner, "tools": functions}}


def with_plain_inputs(steps: Iterator[Event | None], custom: frozenset[str]) -> Iterator[Event | None]:
    """A parser's steps in which the calls of custom tools have the plain input as their arguments, in one piece."""
    held: str | None = None
    for event in steps:
        match event:
            case ToolArguments(text) if held is not None:
                held += text
            case None:
                yield None
            case _:
                if held is not None:
                    yield ToolArguments(plain_input(held))
                held = "" if isinstance(event, ToolStart) and event.name in custom else None
                yield event
    if held is not None:
        yield ToolArguments(plain_input(held))


def plain_input(arguments: str) -> str:
    """The input of a custom tool's call; its arguments as they are if a limit cut them off."""
    try:
        found = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments
