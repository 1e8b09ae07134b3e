"""Parse tool calls: in JSON, or with arguments in tags.

Arguments in JSON are copied from the model's text, never re-encoded. Qwen3-Coder and Qwen3.5 write tags:

    <function=NAME><parameter=CITY>Paris</parameter><parameter=DAYS>3</parameter></function>

A value is text there; the tool's schema determines its JSON type.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.parsers.scan import Event, ToolArguments, ToolStart
from xla_engine.text.parsers.tools import TAGGED, Tools

MAX_CALL = 1 << 20  # characters of one call
_ARGUMENTS = ("arguments", "parameters")
_decoder = json.JSONDecoder()
_blank = re.compile(r"[ \t\n\r]*")


def call_events(text: str) -> list[Event] | None:
    """The events of one call, {"name": ..., "arguments": ...}; None if the text is not a call."""
    try:
        members = dict(_members(text, _skip(text, 0)))
        name = json.loads(members["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name:
        return None
    raw = next((members[key] for key in _ARGUMENTS if key in members), "{}")
    if raw.startswith('"'):  # some models write the arguments as a JSON string
        raw = str(json.loads(raw))
    return [ToolStart(name), ToolArguments(raw)]


def list_events(text: str, *, separator: str | None = None) -> list[Event] | None:
    """The events of several calls: a JSON list, or objects with a separator; None if the text is neither."""
    try:
        pieces = list(_values(text, separator))
    except (ValueError, RecursionError):
        return None
    found = [call_events(piece) for piece in pieces]
    if not found or any(events is None for events in found):
        return None
    return [event for events in found for event in events or ()]


def _values(text: str, separator: str | None) -> Iterator[str]:
    """The raw text of each value of a list, or of separated values."""
    place = _skip(text, 0)
    is_list = text.startswith("[", place)
    if is_list:
        place, separator = _skip(text, place + 1), ","
    while True:
        _, end = _value(text, place)
        yield text[place:end]
        place = _skip(text, end)
        if separator is not None and text.startswith(separator, place):
            place = _skip(text, place + len(separator))
            continue
        if is_list and not text.startswith("]", place):
            raise ValueError("the list does not end")
        if text[place + is_list :].strip():
            raise ValueError("there is more")
        return


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
    if place >= len(text) or len(text) > MAX_CALL:
        raise ValueError("no value")
    value, end = _decoder.raw_decode(text, place)
    return value, end


def _skip(text: str, place: int) -> int:
    found = _blank.match(text, place)
    return place if found is None else found.end()


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


_RULES = r"""call: /\s*/ function /\s*/ "</tool_call>"
any_parameter: /<parameter=[^>\n]+>/ text /\s*/
text[lazy]: /(.|\n)*<\/parameter>/
function:
"""
_ABOUT = frozenset(
    {"type", "description", "title", "default", "examples"}
)  # keywords that hold no value to more
_DEFINITIONS = ("$defs", "definitions")


def tagged_xml(tools: Tools) -> StructuredOutputsParams:
    """Any text whose calls in tags fit the schemas of strict tools. Raises InvalidRequestError.

    Parameters come in the order of the schema. A value whose type is text is free; other values are JSON, held to
    their schema by llguidance. What text alone cannot hold, as a string with a pattern, is refused.
    """
    functions = [
        " ".join([_quoted(f"<function={name}>"), r"/\s*/", *_parameters(tools, name), '"</function>"'])
        for name in tools.schemas
    ]
    return StructuredOutputsParams(grammar=TAGGED + _RULES + "".join(f"  | {each}\n" for each in functions))


def _parameters(tools: Tools, name: str) -> Iterator[str]:
    schema = tools.schemas[name]
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if name not in tools.strict or (not properties and schema.get("additionalProperties") is not False):
        yield "any_parameter*"
        return
    if extra := schema.keys() - _ABOUT - {"properties", "required", "additionalProperties", *_DEFINITIONS}:
        raise _cannot(name, f"the keyword {min(extra)!r}")
    if unknown := set(required) - properties.keys():
        raise _cannot(name, f"the required parameter {min(unknown)!r} without a schema")
    for key, each in properties.items():
        if (value := _xml_value(each, schema)) is None:
            raise _cannot(name, f"the parameter {key!r}, whose schema no grammar of its text can express")
        yield rf"({_quoted(f'<parameter={key}>')} {value} /\s*/)" + ("" if key in required else "?")


def _xml_value(schema: Any, root: Mapping[str, Any]) -> str | None:
    """What may stand between the tags, with the closing one; None for what cannot be held."""
    if _is_plain(schema):
        return "text"
    wanted = kinds(schema, root)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values and all(isinstance(each, str) for each in values):
        return rf'/\n?/ ({" | ".join(map(_quoted, values))}) /\n?/ "</parameter>"'
    if not wanted or "string" in wanted:
        return None
    held = {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}
    return rf'/\s*/ %json {json.dumps(held)} /\s*/ "</parameter>"'


def _is_plain(schema: Any) -> bool:
    """Whether any text is a value: it may be a string, and nothing else that it may be is held to more than a type."""
    if not isinstance(schema, Mapping):
        return schema is True
    several = schema.get("anyOf")
    if isinstance(several, list) and schema.keys() <= _ABOUT | {"anyOf"}:
        only_types = all(isinstance(each, Mapping) and each.keys() <= _ABOUT for each in several)
        return only_types and any(_is_plain(each) for each in several)
    types = schema.get("type", "string")
    return schema.keys() <= _ABOUT and (types == "string" or (isinstance(types, list) and "string" in types))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _cannot(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tools: strict: true is not supported for the function {name!r}: it has {what}, in the format qwen3_coder of "
        'this model. Leave strict out, or give tool_choice "required" or a function'
    )
