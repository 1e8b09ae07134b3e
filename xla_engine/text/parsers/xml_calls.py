"""Parse tool calls with arguments in tags, as Qwen3-Coder and Qwen3.5 write them.

    <function=NAME><parameter=CITY>Paris</parameter><parameter=DAYS>3</parameter></function>

A value is text; the tool's schema determines its JSON type.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from xla_engine.text.parsers.calls import MAX_CALL
from xla_engine.text.parsers.scan import Event, ToolArguments, ToolStart

Schemas = Mapping[str, Mapping[str, Any]]  # argument schemas by tool name

_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's literals, which models sometimes write


def xml_call_events(text: str, schemas: Schemas) -> list[Event] | None:
    """The events of one call; None if the text is not a call, or is truncated."""
    text = text.strip()
    if len(text) > MAX_CALL or not text.startswith(_FUNCTION):
        return None
    name, closed, rest = text[len(_FUNCTION) :].partition(">")
    head, *parts = rest.strip().removesuffix(_END).split(_PARAMETER)
    if not (closed and name.strip()) or "\n" in name or head.strip():
        return None
    schema = schemas.get(name.strip(), {})
    members = []
    for part in _whole(parts):
        key, closed, value = part.partition(">")
        value, ended, after = value.rpartition(_PARAMETER_END)
        if not (closed and ended) or after.strip():
            return None
        members.append(f"{json.dumps(key.strip(), ensure_ascii=False)}: {_json(value, schema, key.strip())}")
    return [ToolStart(name.strip()), ToolArguments("{" + ", ".join(members) + "}")]


def _whole(parts: list[str]) -> Iterator[str]:
    """Join parameters that were split because their value contains the opening tag of a parameter."""
    held: list[str] = []
    for part in parts:
        held.append(part)
        if part.rstrip().endswith(_PARAMETER_END):
            yield _PARAMETER.join(held)
            held = []
    if held:
        yield _PARAMETER.join(held)


def _json(text: str, schema: Mapping[str, Any], name: str) -> str:
    """A value as JSON: unchanged if it is JSON of a type that the schema allows, else as a string."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties")
    wanted = kinds(properties.get(name), schema) if isinstance(properties, Mapping) else frozenset()
    raw = _WORDS.get(text.strip(), text.strip())
    try:
        if wanted and wanted != {"string"} and _kind(json.loads(raw)) & wanted:
            return raw
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def kinds(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON type names that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        several = schema.get(key)
        for each in several if isinstance(several, list) else ():
            found |= kinds(each, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        place: Any = root
        for step in reference[2:].split("/"):
            place = place.get(step) if isinstance(place, Mapping) else None
        found |= kinds(place, root, depth + 1)
    types = schema.get("type", [])
    found |= {types} if isinstance(types, str) else {each for each in types if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else ():
        found |= _kind(value)
    return frozenset(found)


def _kind(value: object) -> frozenset[str]:
    """JSON type names of a value."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
