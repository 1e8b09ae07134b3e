"""`tools` and `tool_choice` of a chat: what the template sees, and what holds the answer to a call."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ARGUMENTS = "/properties/arguments"
_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords that hold data, not schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a chat may call. choice: "none", "auto", "required" or "named". name: of the one tool, if named."""

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    _schemas: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def constraint(self) -> StructuredOutputsParams | None:
        """What the text must match, where a call is forced: the arguments of the named tool, or one whole call."""
        if not self.is_forced:
            return None
        if self.name is not None:
            return StructuredOutputsParams(json=self._schemas[self.name])
        several = len(self._schemas) > 1
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
            for number, (name, schema) in enumerate(self._schemas.items())
        ]
        return StructuredOutputsParams(json=calls[0] if len(calls) == 1 else {"anyOf": calls})


def take_tools(body: dict[str, Any]) -> Tools:
    """Remove `tools`, `tool_choice` and `parallel_tool_calls` from a body. Raises InvalidRequestError."""
    tools, choice = body.pop("tools", None) or [], body.pop("tool_choice", None)
    parallel = body.pop("parallel_tool_calls", None)
    if not isinstance(parallel, bool | None):
        raise _wrong("parallel_tool_calls", f"must be true or false, not {parallel!r}")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"must be a list of at most {MAX_TOOLS} functions")
    schemas: dict[str, Any] = {}
    for number, tool in enumerate(tools):
        name, schema = _function(tool, number)
        if name in schemas:
            raise _wrong("tools", f"has two functions {name!r}")
        schemas[name] = schema
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(wanted, str) or wanted not in schemas:
            raise _wrong("tool_choice", f"names {wanted!r}, which is not among the tools")
        return Tools(tools=tuple(tools), choice="named", name=wanted, _schemas=schemas)
    if choice not in ("none", "auto", "required"):
        raise _wrong("tool_choice", f'must be "none", "auto", "required" or a function, not {choice!r}')
    if choice == "none" or (choice == "auto" and not tools):
        return Tools()
    if not tools:
        raise _wrong("tool_choice", "needs tools to choose from")
    return Tools(tools=tuple(tools), choice=str(choice), _schemas=schemas)


def _function(tool: object, number: int) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise _wrong("tools", f'[{number}] must be {{"type": "function", "function": {{...}}}}')
    name, schema = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("tools", f"[{number}] needs a name of 1 to 64 letters, digits, _, - and .")
    if not isinstance(schema, Mapping):
        raise _wrong("tools", f"[{number}]: parameters must be a JSON schema")
    return name, schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it stands now. place: the pointer to it."""
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
    """An id for a call, by which the client tells its result."""
    return f"call_{secrets.token_hex(12)}"
