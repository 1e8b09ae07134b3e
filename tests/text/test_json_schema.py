"""What is held of a JSON schema: at least what the schema allows, no unlisted properties, and never a refusal for a
keyword that no grammar holds."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.format_models import format_tokenizer
from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text import grammar
from xla_engine.text.grammar import Grammars
from xla_engine.text.json_schema import hold

pytest.importorskip("llguidance")

TOKENIZER = format_tokenizer("hermes")
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, [0])


def accepts(schema: Any, value: Any, **options: Any) -> bool:
    """Whether the value as compact JSON, with its properties in some order, is a text of the schema's constraint."""
    state = GRAMMARS.matcher(StructuredOutputsParams(json=schema, **options))._state
    for text in set(_texts(value)):
        ids = TOKENIZER.plain_ids(text)
        copy = state.deep_copy()
        if copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting():
            return True
    return False


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        members = [[f"{json.dumps(k)}:{text}" for text in _texts(v)] for k, v in value.items()]
        return [
            "{" + ",".join(each) + "}"
            for way in itertools.permutations(members)
            for each in itertools.product(*way)
        ]
    if isinstance(value, list):
        return ["[" + ",".join(each) + "]" for each in itertools.product(*map(_texts, value))]
    return [json.dumps(value)]


KINDS: dict[str, Any] = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list,
    "object": dict,
}  # fmt: skip


def fits(schema: Any, value: Any, root: Any) -> bool:
    """Whether a value fits a schema, by JSON Schema 2020-12, for the keywords that are drawn here."""
    if isinstance(schema, bool):
        return schema
    return all(_keyword(key, given, schema, value, root) for key, given in schema.items())


def _keyword(key: str, given: Any, schema: Mapping[str, Any], value: Any, root: Any) -> bool:
    is_object, is_list = isinstance(value, dict), isinstance(value, list)
    number = isinstance(value, int) and not isinstance(value, bool)
    match key:
        case "type":
            kinds = given if isinstance(given, list) else [given]
            if isinstance(value, bool):
                return "boolean" in kinds
            return any(isinstance(value, KINDS[kind]) for kind in kinds)
        case "enum":
            return json.dumps(value) in map(json.dumps, given)
        case "const":
            return json.dumps(value) == json.dumps(given)
        case "minimum":
            return not number or value >= given
        case "maxLength":
            return not isinstance(value, str) or len(value) <= given
        case "properties":
            return not is_object or all(
                fits(each, value[name], root) for name, each in given.items() if name in value
            )
        case "required":
            return not is_object or set(given) <= value.keys()
        case "additionalProperties":
            patterns = schema.get("patternProperties", {})
            rest = value.keys() - schema.get("properties", {}).keys() if is_object else ()
            rest = [name for name in rest if not any(re.search(pattern, name) for pattern in patterns)]
            return all(fits(given, value[name], root) for name in rest)
        case "items":
            return not is_list or all(fits(given, each, root) for each in value)
        case "uniqueItems":
            return not (is_list and given) or len(set(map(json.dumps, value))) == len(value)
        case "contains":
            return not is_list or any(fits(given, each, root) for each in value)
        case "minProperties":
            return not is_object or len(value) >= given
        case "maxProperties":
            return not is_object or len(value) <= given
        case "patternProperties":
            return not is_object or all(
                fits(each, member, root)
                for pattern, each in given.items()
                for name, member in value.items()
                if re.search(pattern, name)
            )
        case "pattern":
            return not isinstance(value, str) or re.search(given, value) is not None
        case "minItems":
            return not is_list or len(value) >= given
        case "propertyNames":
            return not is_object or all(fits(given, name, root) for name in value)
        case "dependentRequired":
            return not is_object or all(set(n) <= value.keys() for name, n in given.items() if name in value)
        case "anyOf":
            return any(fits(each, value, root) for each in given)
        case "allOf":
            return all(fits(each, value, root) for each in given)
        case "oneOf":
            return sum(fits(each, value, root) for each in given) == 1
        case "not":
            return not fits(given, value, root)
        case "if":
            return fits(schema.get("then" if fits(given, value, root) else "else", True), value, root)
        case "$ref":
            return fits(root["$defs"][given.removeprefix("#/$defs/")], value, root)
    return True


NAMES = st.sampled_from(["a", "b"])
MEMBERS: list[Any] = [1, "x", {"a": 1}]
VALUES: list[Any] = [
    *(
        None,
        True,
        1,
        2,
        "x",
        "yy",
        [],
        [1],
        [1, 1],
        [1, "x"],
        [{"a": 1}],
        {},
        {"ab": 1},
        {"a": 1, "b": 1, "ab": 1},
    ),
    *({"a": first} for first in MEMBERS),
    *({"b": first} for first in MEMBERS),
    *({"a": first, "b": second} for first in MEMBERS for second in MEMBERS),
]


def branches(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    several = st.lists(inner, min_size=1, max_size=2)
    return {
        **dict.fromkeys(("anyOf", "allOf", "oneOf"), several),
        **dict.fromkeys(("not", "if", "then", "else"), inner),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
        "x-any": st.just(1),
    }


def some(
    required: dict[str, Any], optional: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the optional keywords, in any order."""
    return st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries(
            {**{k: st.just(v) for k, v in required.items()}, **{k: optional[k] for k in keys}}
        )
    )


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    objects = {
        "properties": st.dictionaries(NAMES, inner, min_size=1, max_size=2),
        "required": st.lists(NAMES, max_size=1),
        "additionalProperties": inner,
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "patternProperties": st.dictionaries(
            st.sampled_from(["^a", "a", "."]), inner, min_size=1, max_size=2
        ),
        "propertyNames": st.just({"enum": ["a"]}),
        "dependentRequired": st.just({"a": ["b"]}),
    }
    lists = {"items": inner, "uniqueItems": st.just(True), "contains": inner, "minItems": st.integers(0, 2)}
    texts = {
        "maxLength": st.just(1),
        "pattern": st.sampled_from(["^x", "y$", "(?=x)"]),
        "format": st.just("color"),
    }
    others = {"minimum": st.just(2), "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3)}
    kinds = st.sampled_from([["integer", "null"], "boolean", "integer"]).map(lambda kind: {"type": kind})
    return (
        some({"type": "object"}, {**objects, **branches(inner)})
        | some({}, {**objects, **branches(inner)})
        | some({"type": "array"}, {**lists, **branches(inner)})
        | some({"type": "string"}, {**texts, **branches(inner)})
        | some({}, {**lists, **texts, **others, **branches(inner)})
        | kinds
    )


SCHEMAS = st.recursive(st.just(True) | keywords(st.just(True)), keywords, max_leaves=4)
OPEN = {"disable_additional_properties": False}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, definitions=st.tuples(SCHEMAS, SCHEMAS), below=st.booleans())
def test_what_a_schema_allows_is_never_refused(schema: Any, definitions: Any, below: bool) -> None:
    """Keywords that are not held only widen, wherever they stand. References may refer to themselves."""
    body = {"allOf": [schema]} if below or schema is True else schema
    schema = {**body, "$defs": dict(zip("xy", definitions, strict=True))}
    for value in VALUES:
        try:
            good = fits(schema, value, schema)
        except RecursionError:
            return
        if good:
            try:
                assert accepts(schema, value, **OPEN), (schema, value)
            except InvalidRequestError as error:
                assert "processor time" in str(error) or "ended its process" in str(error), schema


AB = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", **AB}, [{"a": 1}], [{"a": 1, "b": 1}, {"a": "x"}, {}]),
        (AB, [{"a": 1}], [{"a": 1, "b": 1}, 5]),
        ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, {"any": [1]}], [1]),
        ({"type": "object", "additionalProperties": True, **AB}, [{"a": 1, "b": 2}], [{"b": 2}]),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, **AB},
            [{"a": 1, "b": None}],
            [{"a": 1, "b": 2}],
        ),
        # a schema without a type is meant for what its keywords are for
        ({"items": {"type": "integer"}}, [[1, -3000], []], [False, 1, {}, ["x"]]),
        ({"items": [{"type": "integer"}]}, [[1], []], [False, {}]),
        ({"prefixItems": [{"type": "integer"}]}, [[1]], ["x", {"a": 1}]),
        ({**AB, "items": {"type": "integer"}}, [{"a": 1}, [1], False], []),
        ({"type": "array", "items": AB}, [[{"a": 1}]], [[5]]),
        (
            {"properties": {"to": {"items": {}}, "of": {**AB, "nullable": True}}},
            [{"to": [], "of": None}],
            [{"to": 1}, {"of": 1}],
        ),
        ({"$ref": "#/$defs/Of", "$defs": {"Of": AB}}, [{"a": 1}], ["text"]),
        # in lists, maps and branches
        ({"type": "array", "items": AB}, [[{"a": 1}]], [[{"a": 1, "b": 1}]]),
        (
            {"type": "object", "additionalProperties": {"type": "object", **AB}},
            [{"x": {"a": 1}}],
            [{"x": {"a": 1, "b": 1}}],
        ),
        ({"anyOf": [AB, {"type": "null"}]}, [{"a": 1}, None], [{"a": 1, "b": 1}]),
        # inheritance: the properties of all parts, and no others
        (
            {
                "allOf": [
                    {"$ref": "#/$defs/Base"},
                    {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
                ],
                "$defs": {"Base": {"type": "object", **AB}},
            },
            [{"a": 1, "b": True}],
            [{"a": 1}, {"a": 1, "b": True, "c": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["x"]}},
                "required": ["k"],
                "anyOf": [AB, {"properties": {"b": {}}, "required": ["b"]}],
            },
            [{"k": "x", "a": 1}, {"k": "x", "b": []}],
            [{"k": "x"}, {"k": "x", "a": 1, "c": 1}],
        ),
        # a tree; its definition is used as a whole value
        (
            {
                "$ref": "#/$defs/N",
                "$defs": {
                    "N": {
                        "type": "object",
                        "properties": {
                            "n": {"type": "integer"},
                            "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
                        },
                        "required": ["n", "next"],
                    }
                },
            },
            [{"n": 1, "next": {"n": 2, "next": None}}],
            [{"n": 1, "next": {"n": 2, "next": None, "x": 1}}, {"n": 1, "next": None, "x": 1}],
        ),
        # properties that only a condition names
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "if": {"required": ["a"]},
                "then": {"required": ["b"]},
            },
            [{"a": 1, "b": 2}, {"a": 1}],
            [{"a": 1, "c": 2}],
        ),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            [{"b": 1}, {"a": 1, "b": 1}],
            [{"b": 1, "c": 1}],
        ),
        # pydantic's dict[Literal["x", "y"], int]
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["x", "y"]},
                "additionalProperties": {"type": "integer"},
            },
            [{"x": 1}, {"y": 2}, {"x": 1, "y": 2}, {}],
            [{"z": 1}, {"x": "a"}],
        ),
        ({"type": "string", "nullable": True}, ["x", None], [1]),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "integer"}}}, [1], ["x"]),
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, [1], ["x"]),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[1]], [["x"], [1, 2]]),
    ],
)
def test_objects_have_the_properties_that_their_schema_lists(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    assert [value for value in good if not accepts(schema, value)] == []
    assert [value for value in bad if accepts(schema, value)] == []
    for value in bad:  # the old form, by an option
        if isinstance(value, dict) and fits(schema, value, schema) and "$ref" not in schema:
            assert accepts(schema, value, **OPEN) or "unevaluatedProperties" in schema


@pytest.mark.parametrize(
    ("schema", "left", "held", "refused"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems", ["x", "x"], [1]),
        ({"type": "integer", "not": {"const": 3}}, "not", 3, "x"),
        (
            {"type": "array", "contains": {"type": "integer"}, "items": {"type": ["integer", "null"]}},
            "contains",
            [None],
            ["x"],
        ),
        ({"type": "string", "format": "color", "maxLength": 2}, "color", "xx", "xxx"),
        ({"type": "string", "pattern": "^(?=x)..$", "maxLength": 2}, "pattern", "yy", "yyy"),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^ab": {"minimum": 1}}},
            "patternProperties",
            {"c": "x"},
            1,
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
            "Properties",
            {"a": 1},
            {"x": 1},
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", 1, "x"),
        (
            {"type": "object", "properties": {"n": {"$ref": "#", "minProperties": 1}}},
            "$ref",
            {"n": {}},
            {"x": 1},
        ),
        ({"type": "integer", "$ref": "https://example.com/x.json"}, "example.com", 1, "x"),
        ({"type": "integer", "required": True}, "required", 1, "x"),
        ({"type": "integer", "minimun": 3}, "minimun", 1, "x"),
    ],
)
def test_what_is_not_held_is_left_to_the_client(
    caplog: pytest.LogCaptureFixture, schema: Any, left: str, held: Any, refused: Any
) -> None:
    """The rest of the schema holds, nested or not, and the log names once what is left."""
    for each, wrap in (
        (schema, lambda value: value),
        ({"type": "array", "items": schema}, lambda value: [value]),
    ):
        if json.dumps(schema).find('"#"') >= 0 and each is not schema:
            continue
        caplog.clear()
        with caplog.at_level(logging.WARNING, "xla_engine.constraints"):
            assert accepts(each, wrap(held)) and not accepts(each, wrap(refused))
            assert accepts(each, wrap(held))
        (record,) = caplog.records
        assert left in record.getMessage()


def test_what_is_left_is_logged_once_though_the_constraint_is_compiled_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_KEPT", 2)
    schemas = [{"type": "array", "uniqueItems": True, "maxItems": most} for most in (11, 12, 13, 14)]
    with caplog.at_level(logging.WARNING, "xla_engine.constraints"):
        for schema in schemas * 2:
            assert accepts(schema, [1])
    assert len(caplog.records) == len(schemas)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objec"}, "#/type: Invalid type 'objec'"),
        ({"properties": {"a": {"type": 5}}}, "#/properties/a/type: Invalid type 5"),
        ({"properties": []}, "#/properties must be an object"),
        ({"required": "a"}, "#/required must be a list"),
        ({"anyOf": []}, "#/anyOf must be a list"),
        ({"items": 5}, "#/items must be an object or true or false"),
        ({"minLength": -1}, "#/minLength must be a whole number"),
        ({"minimum": "3"}, "#/minimum must be a number"),
        ({"multipleOf": 0}, "#/multipleOf must be above 0"),
        ({"pattern": "(a"}, "#/pattern is not a regular expression"),
        ({"$ref": "#/$defs/none"}, "#/$ref: there is no '#/$defs/none'"),
        ({"not": 5}, "#/not must be a schema"),
        ({"enum": []}, "#/enum must be a list of at least one"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ],
)
def test_an_invalid_schema_is_refused_with_the_place(schema: Any, message: str) -> None:
    for _ in range(2):  # also from the cache
        with pytest.raises(InvalidRequestError) as caught:
            accepts(schema, 1)
        assert str(caught.value).startswith("structured_outputs: json ") and message in str(caught.value)
    assert GRAMMARS.knows(StructuredOutputsParams(json=schema))


def test_a_held_schema_stands_anywhere() -> None:
    """Its references are to its own definitions, each written once, also if thousands refer to one another."""
    chain = {f"a{n}": {"properties": {"next": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(2000)}
    found = hold({"$ref": "#/$defs/a0", "$defs": {**chain, "a2000": {"type": "null"}}}, close=True).schema
    assert len(found["$defs"]) == 2001 and len(json.dumps(found)) < 400_000
