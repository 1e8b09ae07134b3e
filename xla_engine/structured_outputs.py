"""Structured output: text that must match a JSON schema, a regular expression, one of several choices, or a grammar.

llguidance (extra `structured`) compiles constraints and computes a bitmask per step; it does not need torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.utils.did_you_mean import naming_fields
from xla_engine.utils.json_size import is_longer
from xla_engine.utils.shown import shown

MAX_CONSTRAINT_CHARACTERS = 1 << 18  # of a schema, expression or grammar as text
MAX_CHOICES = 1024
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@naming_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must match; exactly one of the first five fields. Names are vLLM's.

    json: a JSON schema, as an object or as text, or a pydantic class.
    regex: a regular expression, in the syntax of Rust's regex crate, for the whole text.
    choice: the text is one of these strings.
    grammar: a grammar: Lark with the rule `start`, or GBNF (`::=`) with the rule `root`.
    json_object: any JSON object.
    disable_any_whitespace: no whitespace between the parts of JSON. True by default, because models that may write
        whitespace can do so without end; vLLM's default is false.
    disable_additional_properties: objects whose schema lists properties have no others, unless the schema itself says
        so (`additionalProperties`). By default true for `json`, and false for schemas inside a `grammar`; vLLM's
        default is false.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = True
    disable_additional_properties: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, not {given or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"structured_outputs: {name} must be true or false, not {shown(getattr(self, name))}"
                )
        if not isinstance(self.disable_additional_properties, bool | None):
            raise InvalidRequestError(
                "structured_outputs: disable_additional_properties must be true or false, not "
                f"{shown(self.disable_additional_properties)}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequestError(f"structured_outputs: {name} must be text")
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            object.__setattr__(self, "json", self.json.model_json_schema())
        if not isinstance(self.json, str | Mapping | None):
            raise InvalidRequestError("structured_outputs: json must be a schema, as an object or as text")
        if is_longer((self.json, self.regex, self.grammar), MAX_CONSTRAINT_CHARACTERS):
            raise InvalidRequestError(
                f"structured_outputs: {self.kind} has too many characters; at most {MAX_CONSTRAINT_CHARACTERS}"
            )
        if self.choice is not None:
            _check_choice(self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def from_mapping(cls, values: object) -> StructuredOutputsParams:
        """Build from JSON-like fields. Raises InvalidRequestError naming the first unknown or unsupported field."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"structured_outputs must be an object, not {shown(values)}")
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in _UNSUPPORTED:
                raise InvalidRequestError(
                    f"structured_outputs: {shown(name)} is not supported by this version; remove it"
                )
            if name not in known:
                raise InvalidRequestError(
                    f"structured_outputs: unknown field {shown(name)}; known: {', '.join(sorted(known))}"
                )
        return cls(**values)

    @classmethod
    def from_response_format(cls, value: object) -> StructuredOutputsParams | None:
        """OpenAI's `response_format`; None for type "text". Raises InvalidRequestError."""
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"response_format must be an object, not {shown(value)}")
        match value.get("type"):
            case "text":
                return None
            case "json_object":
                schema = value.get("schema")  # not in OpenAI's API, but in several servers'
                if schema is None:
                    return cls(json_object=True)
                if not isinstance(schema, Mapping):
                    raise InvalidRequestError("response_format: schema must be an object")
                return cls(json=schema)
            case "json_schema":
                described = value.get("json_schema")
                schema = described.get("schema") if isinstance(described, Mapping) else None
                if not isinstance(schema, Mapping):
                    raise InvalidRequestError("response_format: json_schema must be an object with a schema")
                return cls(json=schema)
            case kind:
                raise InvalidRequestError(
                    f'response_format: type must be "text", "json_object" or "json_schema", not {shown(kind)}'
                )


def _check_choice(choice: object) -> None:
    if isinstance(choice, (str, bytes)) or not isinstance(choice, Sequence):
        raise InvalidRequestError("structured_outputs: choice must be a list of strings")
    if not 0 < len(choice) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"structured_outputs: {len(choice)} choices; give 1 to {MAX_CHOICES}, or a regex"
        )
    if not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequestError("structured_outputs: a choice must be a string that is not empty")
    if sum(map(len, choice)) > MAX_CONSTRAINT_CHARACTERS:
        raise InvalidRequestError(
            f"structured_outputs: the choices have too many characters; at most {MAX_CONSTRAINT_CHARACTERS}"
        )


# vLLM's fields that are refused by name.
_UNSUPPORTED = frozenset({"disable_fallback", "structural_tag", "whitespace_pattern"})
