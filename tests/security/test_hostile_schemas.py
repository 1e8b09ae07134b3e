"""Schemas that refer to themselves: whoever reads one does a bounded number of operations, and reads it right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.operations import calls_of
from tests.support.profiles import examples
from xla_engine.openai.requests import LineRequest, parse_record
from xla_engine.text.parsers.kinds import ANY, argument_kinds, kind
from xla_engine.text.parsers.scan import message_of

BUDGET = 300_000  # calls: about 30 ms
VALUES: list[Any] = [None, True, 0, 3, 2.0, 0.5, "", "a", [], [1], {}, {"a": 1}]
TYPES = sorted(ANY)
NAMES = [f"d{number}" for number in range(4)]

leaves = st.one_of(
    st.sampled_from(TYPES).map(lambda name: {"type": name}),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=3).map(lambda names: {"type": names}),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
    st.just({}),
)
references = st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/$defs/{name}"})


def combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["anyOf", "oneOf", "allOf"])
    groups = st.dictionaries(keys, st.lists(parts, min_size=1, max_size=3), min_size=1, max_size=2)
    return st.tuples(groups, leaves).map(lambda both: {**both[1], **both[0]})


schemas = st.recursive(st.one_of(leaves, references), combined, max_leaves=8)


def allows(schema: Any, value: Any, root: Any, depth: int) -> bool:
    """Whether a proof of at most this depth shows that the type of the value is allowed: the plain definition."""
    if depth == 0:
        return False
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if kind(value) not in names and not (kind(value) == "integer" and "number" in names):
            return False
    if "enum" in schema and kind(value) not in map(kind, schema["enum"]):
        return False
    if "const" in schema and kind(value) != kind(schema["const"]):
        return False
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].rsplit("/")[-1]]
        if not allows(target, value, root, depth - 1):
            return False
    if not all(allows(each, value, root, depth - 1) for each in schema.get("allOf", ())):
        return False
    return all(
        any(allows(each, value, root, depth - 1) for each in schema[key])
        for key in ("anyOf", "oneOf")
        if key in schema
    )


@settings(max_examples=examples(80, 1000), deadline=None)
@given(
    argument=schemas,
    # each definition refers to later ones only, so that the definition above ends
    definitions=st.tuples(*(st.one_of(leaves, combined(leaves)) for _ in NAMES)),
)
@example({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, ({},) * 4)
def test_the_types_of_an_argument_are_those_of_its_schema(
    argument: Any, definitions: tuple[Any, ...]
) -> None:
    root = {"properties": {"a": argument}, "$defs": dict(zip(NAMES, definitions, strict=True))}
    found = argument_kinds(root)["a"]
    assert found == {kind(value) for value in VALUES if allows(argument, value, root, 50)}


@settings(max_examples=examples(60, 1000), deadline=None)
@given(argument=schemas, definitions=st.tuples(*(schemas for _ in NAMES)))
@example(
    {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/d0"}]},
    ({"anyOf": [{"type": "integer"}, {"$ref": "#/properties/a"}]}, {}, {}, {}),
)
def test_circles_of_references_end(argument: Any, definitions: tuple[Any, ...]) -> None:
    """Any graph: few operations; and the types are a fixed point, since a reference has those of its target."""
    root = {
        "properties": {
            "a": argument,
            **{name: {"$ref": f"#/$defs/{name}"} for name in NAMES},
            "b": {"$ref": "#/properties/a"},
        },
        "$defs": dict(zip(NAMES, definitions, strict=True)),
    }
    found: dict[str, Any] = {}
    assert calls_of(lambda: found.update(argument_kinds(root)), BUDGET) < 20_000
    assert found["b"] == found["a"]
    if set(argument) <= {"anyOf"} and all(set(each) == {"$ref"} for each in argument.get("anyOf", ())):
        targets = [found[each["$ref"].rsplit("/")[-1]] for each in argument.get("anyOf", ())]
        assert not targets or found["a"] == frozenset().union(*targets)


def itself(times: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * times}}}


def ladder(rungs: int, width: int = 2) -> dict[str, Any]:
    """A chain of schemas, each of which refers to the next several times."""
    chain = {f"s{n}": {"anyOf": [{"$ref": f"#/$defs/s{n + 1}"}] * width} for n in range(rungs)}
    return {"properties": {"a": {"$ref": "#/$defs/s0"}}, "$defs": {**chain, f"s{rungs}": {"type": "integer"}}}


def everyone(count: int) -> dict[str, Any]:
    """Schemas each of which refers to all of them."""
    parts = {f"s{n}": {"allOf": [{"$ref": f"#/properties/s{m}"} for m in range(count)]} for n in range(count)}
    return {"type": "object", "properties": {"a": {"$ref": "#/properties/s0"}, **parts}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"$ref": "#/properties/a"}]}
    return {"properties": {"a": schema}}


HOSTILE = {
    "itself, 20 times": itself(20),
    "itself, 60 times": itself(60),
    "itself, 100,000 times": itself(100_000),
    "a ladder": ladder(60),
    "a long ladder": ladder(20_000),
    "a wide ladder": ladder(100, 100),
    "everyone": everyone(100),
    "nested": nested(400),
    "an enum": {"properties": {"a": {"enum": list(range(1_000_000))}}},
    "a pointer": {"properties": {"a": {"anyOf": [{"$ref": "#" + "/properties/a" * 5000}] * 200}}},
    "no schemas": {"properties": {"a": {"anyOf": 1, "type": 5, "enum": "x", "$ref": 3, "allOf": [None, [], 1]}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_a_bounded_number_of_operations(name: str) -> None:
    """It was exponential in the depth and unbounded in the width; 770 bytes took two seconds for one argument."""
    assert calls_of(lambda: argument_kinds(HOSTILE[name]), BUDGET) <= BUDGET


@pytest.mark.parametrize("name", HOSTILE)
def test_a_call_of_a_tool_with_a_hostile_schema_is_parsed(name: str) -> None:
    """As the server and a batch do it, with several arguments, calls and choices, whose schemas are read once."""
    tool = {"type": "function", "function": {"name": "f", "parameters": HOSTILE[name]}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    request = parse_record(line, 1, {"tool_parser": "qwen3_coder"})
    assert isinstance(request, LineRequest)
    call = "<tool_call><function=f>" + "<parameter=a>3</parameter>" * 50 + "</function></tool_call>"

    def parse() -> None:
        for _ in range(10):
            (first, *_), *others = message_of(request.reading.parser(thinking=False), call * 10).calls
            assert first == "f" and len(others) == 9

    assert calls_of(parse, 2 * BUDGET) <= 2 * BUDGET


@pytest.mark.parametrize("count", [30, 2000])
def test_the_grammar_of_strict_tools_is_bounded(count: int) -> None:
    """Each of many arguments refers to a large definition, which the grammar would repeat."""
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"$ref": "#/$defs/big"} for n in range(count)},
        "$defs": {"big": {"enum": list(range(20_000))}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    request = parse_record(line, 1, {"tool_parser": "qwen3_coder"})
    assert isinstance(request, LineRequest)
    constraint = request.params.structured_outputs
    assert constraint is None or len(constraint.grammar or "") < 1000
