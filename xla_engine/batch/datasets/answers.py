"""Answers that are JSON objects as columns of a table: one for each property of their schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.utils.plain import integer_of

_KINDS = (
    "integer",
    "number",
    "boolean",
    "string",
)  # JSON's types that have columns of their own; the rest is JSON text


@dataclass(frozen=True, slots=True)
class AnswerColumns:
    """The properties of a schema, each with its type in JSON Schema, or "json" for a list, an object or a mixture."""

    kinds: Mapping[str, str]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> AnswerColumns:
        """Raises ConfigError unless answers are objects with named properties."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            raise ConfigError(
                "--json-columns makes a column of each of the schema's properties; give a schema of the type object "
                'with "properties"'
            )
        return cls({name: _kind(each) for name, each in properties.items()})

    def values(self, text: str | None) -> dict[str, Any]:
        """An answer's value for each column; None for what is missing, or of another type than its column."""
        try:
            found = json.loads(text or "")
        except (ValueError, RecursionError):
            found = None  # an answer that ended at max_tokens, or none
        given = found if isinstance(found, dict) else {}
        return {name: _value(kind, given.get(name)) for name, kind in self.kinds.items()}

    def check_names(self, others: Sequence[str]) -> None:
        """Raise ConfigError for a property with the name of another column of the output."""
        if taken := next((name for name in self.kinds if name in others), None):
            raise ConfigError(
                f"the schema's property {taken!r} has the name of another column of the output; rename it, or "
                "leave the input's column out with --keep-columns NAME,NAME"
            )


def read_schema(path: str) -> dict[str, Any]:
    """The schema in a file. Raises ConfigError and OSError."""
    try:
        schema = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{path} must hold a JSON schema, which is an object")
    return schema


def _kind(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, list):  # ["integer", "null"] is an integer with gaps
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if (
        kind is None
        and isinstance(options, list)
        and options
        and all(isinstance(each, str) for each in options)
    ):
        return "string"
    return kind if kind in _KINDS else "json"


def _value(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "integer":
        number = integer_of(value)
        return number if number is not None and -(2**63) <= number < 2**63 else None
    if kind == "number":
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, bool if kind == "boolean" else str) else None
