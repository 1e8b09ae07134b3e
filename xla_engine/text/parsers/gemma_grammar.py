r"""The grammar of arguments in Gemma 4's form, `{key:<|"|>text<|"|>,days:3}`, in llguidance's Lark.

Keys are bare, texts stand between two marks without escapes, and everything else is as in JSON. The marks are special
tokens of some tokenizers and text of others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xla_engine.text.parsers.parameter_bits import MOST, all_set

_DEPTH = 6  # levels of objects and lists that are held; deeper ones are any value
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
COMMON = r"""
gemma_quote: <|"|> | "<|\"|>"
gemma_text: gemma_quote (quoted | UNQUOTED? <|"|>)
quoted[lazy]: /(.|\n)*<\|"\|>/
UNQUOTED: /(.|\n)+/ & ~/(.|\n)*<\|"\|>(.|\n)*/
gemma_key: /[^:,{}\[\]<\s]+/ | gemma_text
gemma_any: gemma_text | gemma_scalar | gemma_list | gemma_object
gemma_scalar: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/ | /true|false|null/
gemma_list: "[" WS? (gemma_any (WS? "," WS? gemma_any)* WS?)? "]"
gemma_object: "{" WS? (gemma_key WS? ":" WS? gemma_any (WS? "," WS? gemma_key WS? ":" WS? gemma_any)* WS?)? "}"
"""


class GemmaRules:
    """Collects the rules of values. lines: those so far."""

    def __init__(self, name: str, number: int) -> None:
        """name: of the tool, for messages. number: of the tool, which the names of its rules contain."""
        self._name, self._prefix = name, f"gemma_{number}"
        self.lines: list[str] = []

    def value(self, schema: object, depth: int = 0) -> str:
        """What a value with this schema may be, as terms of a rule. What no term holds is any value."""
        if not isinstance(schema, Mapping) or depth == _DEPTH:
            return "gemma_any"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
            return "(" + " | ".join(f"gemma_quote {json.dumps(each)} gemma_quote" for each in values) + ")"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds and all(isinstance(each, str) for each in kinds):
            return "(" + " | ".join(self.value({**schema, "type": each}, depth) for each in kinds) + ")"
        if kinds in _SCALARS:
            return f"%json {json.dumps({**schema, 'x-tool': self._name})}"
        if kinds == "string":
            return "gemma_text"
        if kinds == "array":
            item = self.value(schema.get("items"), depth + 1)
            return f'"[" WS? ({item} (WS? "," WS? {item})* WS?)? "]"'
        return self.object(schema, depth) if kinds == "object" else "gemma_any"

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """An object that has each property of the schema at most once, and all that it demands, in any order."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = dict(properties) if isinstance(properties, Mapping) else {}
        required = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
        properties |= {each: True for each in required if each not in properties}
        is_open = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
        if is_open or not schema.keys() & {"properties", "additionalProperties"} or len(properties) > MOST:
            return "gemma_object"
        rule = f"{self._prefix}_{len(self.lines)}"
        self.lines.append("")
        place = len(self.lines) - 1
        members = [
            f'{_key(key)} WS? ":" WS? {self.value(each, depth + 1)} WS? '
            f"{rule}_next::set_bit({bit}) %if bit_clear({bit})"
            for bit, (key, each) in enumerate(properties.items())
        ]
        ends = all_set([bit for bit, key in enumerate(properties) if key in required])
        if not members:
            self.lines[place] = f'{rule}: "{{" WS? "}}"\n'
            return rule
        empty = "" if required else ' | "{" WS? "}"'
        self.lines[place] = (
            f'{rule}: "{{" WS? {rule}_more::0x0{empty}\n{rule}_more::_: '
            + "\n  | ".join(members)
            + f'\n{rule}_next::_: "," WS? {rule}_more::_\n  | "}}" %if {ends}\n'
        )
        return rule


def _key(name: str) -> str:
    return f"({json.dumps(name)} | gemma_quote {json.dumps(name)} gemma_quote)"
