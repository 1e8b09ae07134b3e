"""Rewrite a JSON schema into one that llguidance can hold a text to, and say what is left to whoever reads the text.

The rewritten schema allows at least what the schema allows, with two exceptions that are meant. An object whose schema
lists properties has no others, unless the schema says so (`additionalProperties`, `patternProperties`,
`unevaluatedProperties`). A value whose schema has no type but `properties` or `items` is an object or an array.
References are resolved here, so that the result stands wherever it is put.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from xla_engine.utils.shown import shown

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_ITEMS = ("items", "prefixItems", "additionalItems", "additionalProperties")
# What a schema without a type is written for, if it has the keyword.
_MEANT = {"properties": "object", "items": "array", "prefixItems": "array"}
# Keywords that no grammar here holds: with what their values are.
_SCHEMAS_LEFT = (
    "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "contentSchema",
)  # fmt: skip
_OTHERS_LEFT = (
    "uniqueItems", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
# Keywords that say nothing about the value, or that are read with another.
_ABOUT = frozenset(
    {
        "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "id",
        "contentEncoding", "contentMediaType", "default", "definitions", "deprecated", "description", "discriminator",
        "example", "examples", "externalDocs", "nullable", "readOnly", "strict", "title", "writeOnly", "xml",
    }
)  # fmt: skip
_IN_PLACE = ("then", "else", "if")  # their properties belong to the object, like those of branches
_MOST_STEPS = 100_000  # schemas read while looking for the properties of objects


class SchemaError(ValueError):
    """Not a JSON schema; the text says where and why."""


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema that llguidance can hold, and the keywords of the original that it does not hold."""

    schema: dict[str, Any]
    left: tuple[str, ...]


def hold(schema: object, *, close: bool) -> HeldSchema:
    """The schema that llguidance holds. close: objects have no properties beyond those that their schema lists.

    Raises SchemaError if it is not a schema.
    """
    writer = _Writer(schema, close)
    made = writer.value(schema, "#")
    writer.write_definitions()
    if made is False:
        raise SchemaError("no value fits `false`")
    root: dict[str, Any] = {} if made is True else made
    if writer.definitions:
        root["$defs"] = writer.definitions
    return HeldSchema(root, tuple(writer.left))


# What a schema is widened by, step by step, until llguidance accepts it: keywords to leave out together.
WIDER: tuple[tuple[str, ...], ...] = (
    ("minProperties", "maxProperties"),
    ("patternProperties", "additionalProperties"),  # without the first, the second would hold its properties
    ("pattern",),
    ("format",),
    ("multipleOf",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength", "minItems", "maxItems"),
    ("allOf",),
    ("$ref",),
)


def without(
    schema: Any, keywords: tuple[str, ...], only: Callable[[str, Any], bool] = lambda *_: True
) -> Any:
    """A held schema without some keywords. only: which of their values. `$ref` is left out beside other keywords."""
    if not isinstance(schema, dict):
        return schema
    gone = [key for key in keywords if key in schema and only(key, schema[key])]
    if keywords == ("$ref",):
        gone = gone if len(schema) > 1 + ("$defs" in schema) else []
    elif "patternProperties" in keywords and "patternProperties" not in schema:
        gone = []
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in gone:
            continue
        if key in (*_MAPS, "$defs"):
            made[key] = {name: without(each, keywords, only) for name, each in value.items()}
        elif isinstance(value, list) and key in (*_BRANCHES, *_ITEMS):
            made[key] = [without(each, keywords, only) for each in value]
        else:
            made[key] = without(value, keywords, only) if key in _ITEMS else value
    return made


def patterns_of(schema: Any) -> set[str]:
    """All regular expressions of a held schema."""
    found: set[str] = set()
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found |= {value["pattern"]} if isinstance(value.get("pattern"), str) else set()
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return found


class _Writer:
    """Writes the held form of one schema. Definitions are written once for each way in which they are used."""

    def __init__(self, root: object, close: bool) -> None:
        self.definitions: dict[str, Any] = {}
        self.left: dict[str, None] = {}
        self._root = root
        self._close = close
        self._names: dict[tuple[str, bool], str] = {}
        self._todo: list[tuple[str, object, bool, str]] = []
        self._anchors: dict[str, object] | None = None
        self._steps = 0

    def value(self, schema: object, place: str) -> Any:
        """The held form of the schema of a whole value."""
        return self._write(schema, place, closes=self._close)

    def write_definitions(self) -> None:
        while self._todo:
            name, schema, closes, place = self._todo.pop()
            self.definitions[name] = self._write(schema, place, closes=closes)

    def _write(self, schema: object, place: str, *, closes: bool) -> Any:
        """closes: whether this is the whole schema of a value, which may be closed."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{place} must be an object or true or false, not {shown(schema)}")
        unevaluated = schema.get("unevaluatedProperties") is False
        closing = self._closing(schema) if closes or unevaluated else ""
        if unevaluated and closing != "here":
            self.left["unevaluatedProperties"] = None
        made: dict[str, Any] = {}
        for key, value in schema.items():
            self._keyword(made, key, value, f"{place}/{key}", closing)
        if closing == "here":
            names = dict.fromkeys(self._names_of(schema) or ())
            made["properties"] = {
                **made.get("properties", {}),
                **{n: True for n in names if n not in made.get("properties", {})},
            }
            made["additionalProperties"] = False
        self._map_by_names(made, schema)
        if closes and schema.keys().isdisjoint({"type", "enum", "const", "$ref", *_BRANCHES}):
            meant = {kind for key, kind in _MEANT.items() if key in schema}
            if len(meant) == 1:  # without it, any value of another type would fit
                made = {"type": meant.pop(), **made}
        if schema.get("nullable") is True:  # OpenAPI 3.0
            made = {"anyOf": [made, {"type": "null"}]}
        return made

    def _keyword(self, made: dict[str, Any], key: str, value: Any, place: str, closing: str) -> None:
        if key == "$ref":
            if (name := self._reference(value, place, closes=closing == "below")) is not None:
                made[key] = name
        elif key in _BRANCHES:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"{place} must be a list of at least one schema")
            made[key] = [
                self._write(each, f"{place}/{number}", closes=closing == "below")
                for number, each in enumerate(value)
            ]
        elif key in _MAPS:
            made[key] = {
                name: self.value(each, f"{place}/{name}") for name, each in _mapping(value, place).items()
            }
        elif key in _ITEMS:
            if isinstance(value, list) and key in ("items", "prefixItems"):
                made[key] = [self.value(each, f"{place}/{number}") for number, each in enumerate(value)]
            elif key == "prefixItems":
                raise SchemaError(f"{place} must be a list of schemas")
            else:
                made[key] = self.value(value, place)
        elif key == "required" and isinstance(value, bool):  # draft 3; it belongs to the property
            self.left[key] = None
        elif key in _SCHEMAS_LEFT or key in _OTHERS_LEFT:
            if key in _SCHEMAS_LEFT and not isinstance(value, Mapping | bool):
                raise SchemaError(f"{place} must be a schema, not {shown(value)}")
            if value is not False or key == "not":
                self.left[key] = None
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            self.left[f"format {shown(value)}"] = None
        elif key in _CHECKS:
            made[key] = _CHECKS[key](value, place)
        elif key not in _ABOUT and not key.startswith("x-"):
            self.left[key] = None

    def _map_by_names(self, made: dict[str, Any], schema: Mapping[str, Any]) -> None:
        """`propertyNames` with an enum (pydantic's dict[Literal[...], T]) lists the properties of a map."""
        names = schema.get("propertyNames")
        if not isinstance(names, Mapping) or any(
            key in schema for key in (*_MAPS, *_BRANCHES, "$ref", "required")
        ):
            return
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        if isinstance(listed, list) and listed and all(isinstance(name, str) for name in listed):
            made["properties"] = dict.fromkeys(listed, made.get("additionalProperties", True))
            made["additionalProperties"] = False
            self.left.pop("propertyNames", None)

    def _closing(self, schema: Mapping[str, Any]) -> str:
        """Where an object is closed: "here", "below" (in its only branches or reference), or "" for nowhere."""
        if schema.get("unevaluatedProperties") is False:
            return "here" if self._names_of(schema) is not None else ""
        own = schema.keys() & {
            "properties",
            "required",
            *_IN_PLACE,
            "dependentSchemas",
            "dependentRequired",
            "dependencies",
        }
        inner = [key for key in (*_BRANCHES, "$ref") if key in schema]
        if not own and (
            inner == ["$ref"] or (len(inner) == 1 and (inner[0] != "allOf" or len(schema["allOf"]) == 1))
        ):
            return "below"
        names = self._names_of(schema)
        return "here" if names else "" if names is None or "properties" not in schema else "here"

    def _names_of(self, schema: Mapping[str, Any]) -> dict[str, None] | None:
        """The names of all properties that an object's schema lists, in place and in its branches, in order.

        None if it says which others there may be, or lists none.
        """
        names: dict[str, None] = {}
        todo: list[object] = [schema]
        seen: set[int] = set()
        lists = False
        while todo:
            each = todo.pop(0)
            self._steps += 1
            if self._steps > _MOST_STEPS:
                return None
            if not isinstance(each, Mapping) or id(each) in seen:
                continue
            seen.add(id(each))
            unevaluated = each.get("unevaluatedProperties", False)
            if "additionalProperties" in each or "patternProperties" in each or unevaluated is not False:
                return None
            lists |= "properties" in each
            for key in ("properties", "required"):
                value = each.get(key)
                names |= (
                    dict.fromkeys(name for name in value if isinstance(name, str))
                    if isinstance(value, Mapping | list)
                    else {}
                )
            todo += _beside(each)
            if isinstance(reference := each.get("$ref"), str):
                todo.append(self._target(reference))
        return names if lists else None

    def _reference(self, value: object, place: str, *, closes: bool) -> str | None:
        """The reference to the held form of a definition; None if it is not in this schema."""
        if not isinstance(value, str):
            raise SchemaError(f"{place} must be text, not {shown(value)}")
        if not value.startswith("#"):
            self.left[f"$ref {shown(value)}"] = None
            return None
        if (target := self._target(value)) is None:
            raise SchemaError(f"{place}: there is no {shown(value)} in the schema")
        if value in ("#", "#/"):
            value = "#"
        if (value, closes) not in self._names:
            name = self._names[value, closes] = f"d{len(self._names)}"
            self.definitions[name] = True  # until it is written
            self._todo.append((name, target, closes, value))
        return f"#/$defs/{self._names[value, closes]}"

    def _target(self, reference: str) -> object:
        """What a reference into this schema refers to; None if there is nothing."""
        if reference in ("#", "#/"):
            return self._root
        if reference.startswith("#/"):
            place = self._root
            for step in reference[2:].split("/"):
                step = unquote(step).replace("~1", "/").replace("~0", "~")
                if isinstance(place, Mapping):
                    place = place.get(step)
                elif isinstance(place, list) and step.isdigit() and len(step) < 9 and int(step) < len(place):
                    place = place[int(step)]
                else:
                    return None
            return place
        if self._anchors is None:
            self._anchors = dict(_anchors(self._root))
        return self._anchors.get(reference)


def _beside(schema: Mapping[str, Any]) -> Iterator[object]:
    """The schemas that hold the same object: branches and conditions."""
    for key in _BRANCHES:
        if isinstance(several := schema.get(key), list):
            yield from several
    for key in _IN_PLACE:
        yield schema.get(key)
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(several := schema.get(key), Mapping):
            yield from ({"required": each} if isinstance(each, list) else each for each in several.values())
    if isinstance(needed := schema.get("dependentRequired"), Mapping):
        yield from ({"required": each} for each in needed.values())


def _anchors(root: object) -> Iterator[tuple[str, object]]:
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            for key, sign in (("$anchor", "#"), ("$id", ""), ("id", "")):
                if isinstance(name := value.get(key), str) and f"{sign}{name}".startswith("#"):
                    yield f"{sign}{name}", value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{place} must be an object, not {shown(value)}")
    return value


def _type(value: object, place: str) -> object:
    types = value if isinstance(value, list) and value else [value]
    for each in types:
        if each not in TYPES:
            raise SchemaError(f"{place}: Invalid type {shown(each)}; types are {', '.join(TYPES)}")
    return value


def _count(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError(f"{place} must be a whole number of at least 0, not {shown(value)}")
    return int(value)


def _number(value: object, place: str) -> object:
    if isinstance(value, bool) and place.rpartition("/")[2].startswith("exclusive"):  # draft 4
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(f"{place} must be a number, not {shown(value)}")
    if place.endswith("/multipleOf") and value <= 0:
        raise SchemaError(f"{place} must be above 0, not {shown(value)}")
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise SchemaError(f"{place} must be text, not {shown(value)}")
    return value


def _pattern(value: object, place: str) -> str:
    text = _text(value, place)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        if re.search(r"unterminated|unbalanced|nothing to repeat|missing \)", str(error)):
            raise SchemaError(f"{place} is not a regular expression: {shown(text)}: {error}") from None
    return text


def _required(value: object, place: str) -> object:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise SchemaError(f"{place} must be a list of texts, not {shown(value)}")
    return value


def _enum(value: object, place: str) -> object:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"{place} must be a list of at least one value")
    return value


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "type": _type,
    "const": lambda value, _: value,
    "enum": _enum,
    "required": _required,
    "pattern": _pattern,
    "format": _text,
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(_NUMBERS, _number),
}


def compact(schema: Mapping[str, Any]) -> str:
    """A schema as JSON."""
    return json.dumps(schema, separators=(",", ":"))
