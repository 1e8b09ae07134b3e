"""What a tool call says: in JSON, or with arguments in tags.

Arguments in JSON are copied from the model's text, never re-encoded. Qwen3-Coder and Qwen3.5 write tags:

    <function=NAME><parameter=CITY>Paris</parameter><parameter=DAYS>3</parameter></function>

A value is text there; the tool's schema determines its JSON type.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xla_engine.text.parsers.json_value import PYTHON, JsonValue
from xla_engine.text.parsers.kinds import ANY, NONE, Kinds, kind
from xla_engine.text.parsers.scan import Event, Scanner, ToolArguments, ToolStart

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of the offered tools, by their names
NAMES = ("name", "function", "tool", "tool_name", "function_name")
ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
ABOUT = ("id", "type", "index", "call_id", "tool_call_id")
WRAPPERS = (
    "function",
    "function_call",
    "tool_call",
    "tool_calls",
)  # members that hold a call, or a list of calls
MAX_DEPTH = 6  # lists and wrappers around a call
_decoder = json.JSONDecoder()
_blank = re.compile(r"[ \t\n\r]*")


def call_events(name: str, arguments: str) -> list[Event]:
    return [ToolStart(name), ToolArguments(arguments)]


def json_calls(text: str, schemas: Schemas, *, bare: bool = False, depth: int = 0) -> list[Event] | None:
    """The events of the calls that a JSON text is: one or a list, each {"name": ..., "arguments": ...} or a variant,
    or, unless it is bare, {NAME: {...}}.

    None if the text is anything else. schemas: of the offered tools by name; empty if any name is a tool's. bare: only
    the text says that it is a call, so it must have the arguments too, and not be the description of the tool.
    """
    try:
        place = _skip(text, 0)
        if text.startswith("[", place):
            if depth == MAX_DEPTH:
                return None
            found = [json_calls(raw, schemas, bare=bare, depth=depth + 1) for raw in _items(text, place)]
            calls = [event for events in found for event in events or ()]
            return calls if found and None not in found else None
        members = dict(_members(text, place))
    except (ValueError, RecursionError):
        return None
    for key in WRAPPERS:
        if members.get(key, "")[:1] in ("{", "[") and members.keys() <= {key, *ABOUT} and depth < MAX_DEPTH:
            return json_calls(members[key], schemas, bare=bare, depth=depth + 1)
    if not bare and len(members) == 1:
        ((key, raw),) = members.items()
        if raw.startswith("{") and (
            key in schemas or not (schemas or key in (*NAMES, *ARGUMENTS, *WRAPPERS))
        ):
            return call_events(key, raw)
    names = [name for key in NAMES if isinstance(name := _text(members.get(key, "")), str)]
    if not names or not members.keys() <= {*NAMES, *ARGUMENTS, *ABOUT}:
        return None
    given = [members[key] for key in ARGUMENTS if key in members]
    arguments = object_text(given[0]) if given else None if bare else "{}"
    if not names[0] or (schemas and names[0] not in schemas) or arguments is None:
        return None
    if bare and _is_schema(arguments, schemas.get(names[0], {})):
        return None
    return call_events(names[0], arguments)


def _text(raw: str) -> str | None:
    """The string that a JSON text is."""
    return json.loads(raw) if raw.startswith('"') else None


def object_text(text: str) -> str | None:
    """A JSON object as it was written, or in a string of JSON; no text or null is an empty one. None for others."""
    for _ in range(3):
        if text.startswith('"'):
            text = str(json.loads(text)).encode(errors="replace").decode()
        if text.strip() in ("", "null"):
            return "{}"
        if text.startswith("{"):
            return text
        scan, value = Scanner(), JsonValue()
        scan.push(text)
        scan.ended = True
        while value.is_open:
            value.step(scan)
        if value.before != "nothing" or scan.rest().strip():
            return None
        text = value.text().strip()
    return None


def _is_schema(arguments: str, schema: Mapping[str, Any]) -> bool:
    """Whether arguments describe arguments, as in a list of the tools."""
    given = json.loads(arguments)
    properties = schema.get("properties")
    if given and isinstance(properties, Mapping) and given.keys() <= properties.keys():
        return False
    return given == schema or (given.get("type") == "object" and isinstance(given.get("properties"), Mapping))


def _items(text: str, place: int) -> Iterator[str]:
    """The raw values of a list that spans the whole text."""
    place = _skip(text, place + 1)
    while not text.startswith("]", place):
        _, end = _value(text, place)
        yield text[place:end]
        place = _skip(text, end)
        if text.startswith(",", place):
            place = _skip(text, place + 1)
        elif not text.startswith("]", place):
            raise ValueError("the list does not end")
    if text[place + 1 :].strip():
        raise ValueError("there is more")


def _members(text: str, place: int) -> Iterator[tuple[str, str]]:
    """The names and raw values of an object that spans the whole text."""
    if not text.startswith("{", place):
        raise ValueError("no object")
    place = _skip(text, place + 1)
    while not text.startswith("}", place):
        name, place = _value(text, place)
        place = _skip(text, place)
        if not isinstance(name, str) or not text.startswith(":", place):
            raise ValueError("no member")
        place = _skip(text, place + 1)
        _, end = _value(text, place)
        yield name, text[place:end]
        place = _skip(text, end)
        if text.startswith(",", place):
            place = _skip(text, place + 1)
        elif not text.startswith("}", place):
            raise ValueError("the object does not end")
    if text[place + 1 :].strip():
        raise ValueError("there is more")


def _value(text: str, place: int) -> tuple[object, int]:
    if place >= len(text):
        raise ValueError("no value")
    value, end = _decoder.raw_decode(text, place)
    return value, end


def _skip(text: str, place: int) -> int:
    found = _blank.match(text, place)
    return place if found is None else found.end()


def tagged_arguments(
    values: Mapping[str, str], kinds: Mapping[str, Kinds], *, own_lines: bool | None = True
) -> str:
    """Arguments whose values are text, as JSON.

    kinds: the types that the tool's schema allows. own_lines: the line breaks around a value are not part of it; None:
    only if there are two.
    """
    members = (
        f"{_quoted(key)}: "
        + _json(
            value if own_lines is False else _inner(value, either_side=own_lines is True), kinds.get(key, ANY)
        )
        for key, value in values.items()
    )
    return "{" + ", ".join(members) + "}"


def _json(text: str, allowed: Kinds) -> str:
    """A value as JSON: unchanged if it is JSON of a type that the schema names, else as a string."""
    raw = PYTHON.get(text.strip(), text.strip())
    try:
        if allowed not in (ANY, NONE, {"string"}) and kind(json.loads(raw)) in allowed:
            return raw
    except (ValueError, RecursionError):
        pass
    return _quoted(text)


def _inner(text: str, *, either_side: bool) -> str:
    """Without the line breaks around it, or the brackets of an XML section of characters (MiniCPM)."""
    if either_side or (len(text) > 1 and text[0] == text[-1] == "\n"):
        text = text.removeprefix("\n").removesuffix("\n")
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text.removeprefix("<![CDATA[").removesuffix("]]>")
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
