"""A grammar that holds calls with arguments in tags (`xml_calls`) to the schemas of strict tools.

Parameters come in the order of the schema. A value whose type is text is free; other values are JSON, held to their
schema by llguidance. What text alone cannot hold, as a string with a pattern, is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.parsers.tools import TAGGED, Tools
from xla_engine.text.parsers.xml_calls import kinds

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
    """Any text whose calls fit the schemas of strict tools. Raises InvalidRequestError."""
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
        if (value := _value(each, schema)) is None:
            raise _cannot(name, f"the parameter {key!r}, whose schema no grammar of its text can express")
        yield rf"({_quoted(f'<parameter={key}>')} {value} /\s*/)" + ("" if key in required else "?")


def _value(schema: Any, root: Mapping[str, Any]) -> str | None:
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
