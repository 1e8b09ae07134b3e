"""`tools` and `tool_choice` of a chat. `call_grammars` turns them into constraints on the answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.parsers.call_grammars import calls_grammar, forced_call
from xla_engine.text.parsers.kinds import Kinds, argument_kinds
from xla_engine.utils.shown import shown

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Keywords of JSON schemas that restrict a value.
_KINDS = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"})


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
    _kinds: dict[str, Mapping[str, Kinds]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def kinds(self, name: str) -> Mapping[str, Kinds]:
        """JSON types of a tool's arguments, by their names; computed once for all choices and calls."""
        if name not in self._kinds and name in self.schemas:
            self._kinds[name] = argument_kinds(self.schemas[name])
        return self._kinds.get(name, {})

    def constraint(self) -> StructuredOutputsParams | None:
        """The constraint of a forced call: the arguments of the named tool, or one whole call. None if none is
        forced."""
        if not self.is_forced:
            return None
        return (
            forced_call(self) if self.name is None else StructuredOutputsParams(json=self.schemas[self.name])
        )

    def tagged(self) -> StructuredOutputsParams | None:
        """The constraint under which calls in `<tool_call>` of strict tools fit their schemas; other text is free."""
        return calls_grammar(self, "hermes")


def take_tools(body: dict[str, Any]) -> Tools:
    """Remove `tools`, `tool_choice` and `parallel_tool_calls` from a body. Raises InvalidRequestError.

    With a `tool_choice` of type "allowed_tools", other tools are dropped.
    """
    tools, choice = body.pop("tools", None) or [], body.pop("tool_choice", None)
    parallel = body.pop("parallel_tool_calls", None)
    if not isinstance(parallel, bool | None):
        raise _wrong("parallel_tool_calls", f"must be true or false, not {shown(parallel)}")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"must be a list of at most {MAX_TOOLS} functions")
    schemas: dict[str, Any] = {}
    strict: set[str] = set()
    for number, tool in enumerate(tools):
        name, schema, is_strict = _function(tool, number)
        if name in schemas:
            raise _wrong("tools", f"has two functions {shown(name)}")
        schemas[name] = schema
        strict |= {name} if is_strict else set()
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, schemas)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        schemas = {name: schema for name, schema in schemas.items() if name in allowed}
    tools = [{**tool, "function": _shown(tool["function"])} for tool in tools]
    common: Any = {"parallel": parallel is not False, "schemas": schemas, "strict": frozenset(strict)}
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(wanted, str) or wanted not in schemas:
            raise _wrong("tool_choice", f"names {shown(wanted)}, which is not among the tools")
        return Tools(tools=tuple(tools), choice="named", name=wanted, **common)
    if choice not in ("none", "auto", "required"):
        raise _wrong("tool_choice", f'must be "none", "auto", "required" or a function, not {shown(choice)}')
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
    name, schema = function.get("name"), function.get("parameters")
    if schema is None or schema == {}:  # as OpenAI reads it: it takes no arguments
        schema = {"type": "object", "properties": {}}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("tools", f"[{number}] needs a name of 1 to 64 letters, digits, _, - and .")
    if not isinstance(schema, Mapping):
        raise _wrong("tools", f"[{number}]: parameters must be a JSON schema")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise _wrong("tools", f"[{number}]: strict must be true or false, not {shown(strict)}")
    if _KINDS.isdisjoint(schema):
        schema = {"type": "object", **schema}
    return name, schema, strict is True


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as the template sees it: `strict` is about the answer, and must not change the prompt."""
    return {key: value for key, value in function.items() if key != "strict"}


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {message}")
