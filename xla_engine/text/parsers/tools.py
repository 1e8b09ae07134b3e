"""`tools` and `tool_choice` of a chat: parsed for the template, and turned into constraints on the answer."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.utils.shown import shown

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ARGUMENTS = "/properties/arguments"
_ARGUMENTS_NAME = '"arguments": '
# An llguidance grammar: any number of calls, each with text up to its opening tag; then text without that tag.
TAGGED = r"""start: (opened call)* REST
opened[lazy]: /(.|\n)*<tool_call>/
REST: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
"""
_JSON = r"""call: /\s*/ "{\"name\": " tool "}" /\s*/ "</tool_call>"
tool:
"""
_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are data, not schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a chat.

    choice: "none", "auto", "required" or "named". name: of the tool, if named. parallel: whether the answer may
    have more than one call. schemas: of each tool's arguments, by its name. strict: the tools whose calls
    must fit them.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def constraint(self) -> StructuredOutputsParams | None:
        """The constraint of a forced call: the arguments of the named tool, or one whole call. None if none is
        forced."""
        if not self.is_forced:
            return None
        if self.name is not None:
            return StructuredOutputsParams(json=self.schemas[self.name])
        several = len(self.schemas) > 1
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(
                        schema, f"#/anyOf/{number}{_ARGUMENTS}" if several else f"#{_ARGUMENTS}"
                    ),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, (name, schema) in enumerate(self.schemas.items())
        ]
        return StructuredOutputsParams(json=calls[0] if len(calls) == 1 else {"anyOf": calls})

    def tagged(self) -> StructuredOutputsParams:
        """A constraint that allows any text, but whose `<tool_call>` calls fit the schemas."""
        calls = [
            f"{json.dumps(json.dumps(name) + ', ')} {json.dumps(_ARGUMENTS_NAME)} %json {json.dumps(schema)}"
            for name, schema in self.schemas.items()
        ]
        return StructuredOutputsParams(
            grammar=TAGGED + _JSON + "\n".join(f"  | {call}" for call in calls) + "\n"
        )


def take_tools(body: dict[str, Any]) -> Tools:
    """Remove `tools`, `tool_choice` and `parallel_tool_calls` from a body. Raises InvalidRequestError.

    With a `tool_choice` of type "allowed_tools", other tools are dropped.
    """
    tools, choice = body.pop("tools", None) or [], body.pop("tool_choice", None)
    parallel = body.pop("parallel_tool_calls", None)
    if not isinstance(parallel, bool | None):
        raise _wrong("parallel_tool_calls", f"must be true or false, not {parallel!r}")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"must be a list of at most {MAX_TOOLS} functions")
    schemas: dict[str, Any] = {}
    strict: set[str] = set()
    for number, tool in enumerate(tools):
        name, schema, is_strict = _function(tool, number)
        if name in schemas:
            raise _wrong("tools", f"has two functions {name!r}")
        schemas[name] = schema
        strict |= {name} if is_strict else set()
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, schemas)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        schemas = {name: schema for name, schema in schemas.items() if name in allowed}
    common: Any = {"parallel": parallel is not False, "schemas": schemas, "strict": frozenset(strict)}
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(wanted, str) or wanted not in schemas:
            raise _wrong("tool_choice", f"names {wanted!r}, which is not among the tools")
        return Tools(tools=tuple(tools), choice="named", name=wanted, **common)
    if choice not in ("none", "auto", "required"):
        raise _wrong("tool_choice", f'must be "none", "auto", "required" or a function, not {choice!r}')
    if choice == "none" or (choice == "auto" and not tools):
        return Tools()
    if not tools:
        raise _wrong("tool_choice", "needs tools to choose from")
    return Tools(tools=tuple(tools), choice=str(choice), **common)


def _allowed(choice: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[object, set[str]]:
    """Mode and names of OpenAI's allowed tools, in the format of a chat or of a response."""
    inner = choice.get("allowed_tools", choice)
    given = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(given, list) or not given or inner.get("mode") not in ("auto", "required"):
        raise _wrong("tool_choice", 'allowed_tools needs a mode, "auto" or "required", and a list of tools')
    names = set()
    for tool in given:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in schemas:
            raise _wrong("tool_choice", f"allows {shown(name)}, which is not among the tools")
        names.add(name)
    return inner["mode"], names


def _function(tool: object, number: int) -> tuple[str, Mapping[str, Any], bool]:
    """Name, argument schema and strictness of a function."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise _wrong("tools", f'[{number}] must be {{"type": "function", "function": {{...}}}}')
    name, schema = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("tools", f"[{number}] needs a name of 1 to 64 letters, digits, _, - and .")
    if not isinstance(schema, Mapping):
        raise _wrong("tools", f"[{number}]: parameters must be a JSON schema")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise _wrong("tools", f"[{number}]: strict must be true or false, not {shown(strict)}")
    return name, schema, strict is True


def _moved(schema: Any, place: str) -> Any:
    """Rewrite a schema's local references for its new place in a larger schema. place: the JSON pointer to it."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: value if key in _VALUES else _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {message}")


def new_call_id() -> str:
    """A random id for a tool call, which the client's result refers to."""
    return f"call_{secrets.token_hex(12)}"
