"""The JSON types that a tool's schema allows for each argument.

A schema is a graph: `$ref` may point anywhere in it, also back, and a descent that does not record where it has been
takes exponential time. So the types are computed as a least fixed point: each schema begins without a type, and each
round adds the types that the parts of each schema allow, until a round changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Kinds = frozenset[str]
ANY: Kinds = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
NONE: Kinds = frozenset()
# Bounds of the work for one tool. What lies beyond allows any type, so its values stay text.
MAX_VISITS = 4_000  # schemas and references between them, each twice
MAX_ROUNDS = 16  # two are enough unless references form circles within circles
_UNITS_A_VISIT = 50  # values of an enum, characters of a reference
_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    str: "string",
    list: "array",
    dict: "object",
}


def kind(value: object) -> str:
    """The JSON type of a value. An integral number is an "integer"; "number" stands for the other numbers."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPES.get(type(value), "object")


def argument_kinds(root: Mapping[str, Any]) -> dict[str, Kinds]:
    """JSON types that each property of a schema of arguments allows; `ANY` where the schema does not restrict them."""
    properties = root.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    nodes = _reachable(properties.values(), root)
    found = dict.fromkeys(nodes, NONE)
    for _ in range(MAX_ROUNDS):
        before = found.copy()
        for name, node in nodes.items():
            found[name] = node.kinds(found)
        if found == before:
            return {name: found.get(id(each), ANY) for name, each in properties.items()}
    return dict.fromkeys(properties, ANY)


@dataclass(frozen=True, slots=True)
class _Node:
    """One schema. own: the types that its own keywords allow. parts: other schemas by id, in groups: the types that
    some schema of each group allows."""

    own: Kinds
    parts: tuple[tuple[int, ...], ...]

    def kinds(self, found: Mapping[int, Kinds]) -> Kinds:
        allowed = self.own
        for group in self.parts:
            allowed &= NONE.union(*(found.get(each, ANY) for each in group))
        return allowed


def _reachable(schemas: Iterable[object], root: Mapping[str, Any]) -> dict[int, _Node]:
    """The schemas that decide the types of these, by id, each after its parts except in circles."""
    nodes: dict[int, _Node] = {}
    seen: set[int] = set()
    todo = [(each, False) for each in schemas]
    visits = len(todo)
    while todo:
        schema, is_done = todo.pop()
        if not isinstance(schema, Mapping) or (id(schema) in seen and not is_done):
            continue
        visits += _size(schema)
        if visits > MAX_VISITS:
            break
        groups = list(_groups(schema, root))
        if is_done:
            nodes[id(schema)] = _Node(_own(schema), tuple(tuple(map(id, group)) for group in groups))
        else:
            seen.add(id(schema))
            todo.append((schema, True))
            todo += [(part, False) for group in groups for part in group]
    return nodes


def _size(schema: Mapping[str, Any]) -> int:
    """How many visits it costs to look at a schema, not counting its parts' own."""
    parts = sum(len(_list(schema, key)) for key in ("anyOf", "oneOf", "allOf", "type"))
    reference = schema.get("$ref")
    others = len(_list(schema, "enum")) + (len(reference) if isinstance(reference, str) else 0)
    return 1 + parts + others // _UNITS_A_VISIT


def _groups(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The schemas that a schema refers to, in the groups of `_Node`."""
    yield from (several for key in ("anyOf", "oneOf") if (several := _list(schema, key)))
    yield from ([each] for each in _list(schema, "allOf"))
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        yield [_referred(reference, root)]


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """The value to which a JSON pointer (RFC 6901) leads; None if there is none."""
    place: Any = root
    for step in reference.removeprefix("#").removeprefix("/").split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and step.isdecimal() and len(step) < 10 and int(step) < len(place):
            place = place[int(step)]
        elif isinstance(place, Mapping) and step in place:
            place = place[step]
        else:
            return None
    return place


def _own(schema: Mapping[str, Any]) -> Kinds:
    """The types that `type`, `enum` and `const` of a schema allow."""
    allowed = ANY
    types = schema.get("type")
    names = {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)} & ANY
    if names:
        allowed &= names | ({"integer"} if "number" in names else NONE)
    if values := _list(schema, "enum"):
        allowed &= frozenset(map(kind, values))
    if "const" in schema:
        allowed &= {kind(schema["const"])}
    return allowed


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
