"""One line of bytes as one JSON object, strictly.

A line must be an I-JSON object (RFC 7493: UTF-8, no duplicate names, no NaN or Infinity, no lone surrogates;
integers within 64 bits) nested at most `MAX_NESTING` deep: what other readers might read differently is refused.
Lines are bounded in bytes before they come here; parsing may hold 25 times as much.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_NESTING = 64  # containers inside one another in one line


def load_object(raw: bytes) -> dict[str, Any]:
    """The object that `raw` spells. Raises ValueError with a message for people, and nothing else."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(_message(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object, not {kind(value)}")
    _check_values(value)
    return value


def dump_line(record: object) -> bytes:
    """A record as one line. ASCII only: U+2028 and the like in text would end a line for some readers."""
    return json.dumps(record, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} stands twice in one object")
            seen.add(name)
    return record


def _check_values(value: object) -> None:
    """Walk level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(
                        "a string holds half of a surrogate pair; write the whole character"
                    ) from error
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise ValueError("a number is too large for a 64-bit float")
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise ValueError("an integer does not fit into 64 bits")
        if not below:
            return
        level = below
    raise ValueError(f"nested more than {MAX_NESTING} deep")


def _message(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start + 1}"
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_NESTING} deep"
    return str(error)
