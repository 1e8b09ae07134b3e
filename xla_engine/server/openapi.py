"""`/openapi.json`: the paths and request fields of a server, generated from its routes and records."""

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from starlette.routing import Route

from xla_engine import __version__
from xla_engine.openai.fields import CHAT_URL, COMPLETIONS_URL, LABELS, LINE_FIELDS
from xla_engine.sampling_params import SamplingParams
from xla_engine.server.middleware import OPEN_PATHS

_JSON = "application/json"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_OWN = {COMPLETIONS_URL: ("prompt",), CHAT_URL: ("messages",)}  # required fields


def description(routes: Iterable[Route], *, has_keys: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or {"POST"}) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "xla-engine", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"SamplingParams": _sampling(), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str, *, has_keys: bool) -> dict[str, Any]:
    about = inspect.getdoc(route.endpoint) or ""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {
        "summary": about.partition("\n")[0].replace("`", ""),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ],
        "responses": {
            "200": {"description": "the answer"},
            "default": {
                "description": "an error",
                "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if has_keys and path not in OPEN_PATHS:
        found["security"] = [{"key": []}]
    if path in _OWN:
        schema = {"allOf": [{"$ref": "#/components/schemas/SamplingParams"}, {"required": _OWN[path]}]}
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return found


def _sampling() -> dict[str, Any]:
    hints = typing.get_type_hints(SamplingParams)
    properties: dict[str, Any] = {name: {} for name in sorted(LINE_FIELDS | LABELS)}
    for each in fields(SamplingParams):
        properties[each.name] = _schema(hints[each.name])
        if each.default is not MISSING and isinstance(each.default, bool | int | float | str):
            properties[each.name] |= {"default": each.default}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema(kind: Any) -> dict[str, Any]:
    """JSON Schema of a type; empty if JSON has no equivalent."""
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if each is type(None) else _schema(each) for each in arguments]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(arguments[0]) if arguments else {}}
    return {}


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")
            },
        }
    },
}
