"""Parse one line of bytes strictly as one JSON object.

A line must be an I-JSON object (RFC 7493: UTF-8, no duplicate names, no NaN or Infinity, no lone surrogates; integers
within 64 bits) nested at most `MAX_NESTING` deep. Anything that other parsers might read differently is an error.

Callers limit the bytes of a line, and the number of values is checked before parsing. Parsing thus holds the
interpreter lock for at most a few milliseconds, and takes a few times the line's memory.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_NESTING = 64  # containers inside one another in one line
MAX_VALUES = 1 << 16  # strings, names, lists and objects in one line; numbers are bounded by its bytes
_SCANNED = 64 << 10  # bytes at a time
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def load_object(raw: bytes, *, nan_is_null: bool = False) -> dict[str, Any]:
    """Parse the object in `raw`. Raises only ValueError, with a readable message.

    nan_is_null: read NaN, which Python's `json` writes for pandas' missing values, as null.
    """
    try:
        check_structure(raw)
        value = json.loads(raw.decode("utf-8"), **(_HOOKS_OF_TABLES if nan_is_null else _HOOKS))
    except (ValueError, RecursionError) as error:
        raise ValueError(_message(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a JSON object, not {kind(value)}")
    _check_nesting(value, strings=any(escape in raw for escape in (b"\\ud", b"\\uD")))
    return value


def check_structure(raw: bytes) -> None:
    """Raise ValueError if `raw` may have more than `MAX_VALUES` strings, names, lists and objects."""
    if len(raw) > MAX_VALUES and sum(_values(raw)) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} strings, names, lists and objects")


def _values(raw: bytes) -> Iterator[int]:
    """The number of strings, names, lists and objects in each part of the line, counted by quotes and brackets only.

    NumPy's loops release the interpreter lock.
    """
    import numpy as np  # imported here to keep `--help` fast

    quoted, escape = False, False  # at the beginning of the part: within a string; behind an odd backslash
    for begin in range(0, len(raw), _SCANNED):
        part = np.frombuffer(raw, np.uint8, min(_SCANNED, len(raw) - begin), begin)
        quotes = part == _QUOTE
        slashes = part == _BACKSLASH
        if escape or slashes.any():
            places = np.arange(len(part))
            last = np.maximum.accumulate(np.where(slashes, -1 - int(escape), places))  # that is no backslash
            before = np.concatenate(([-1 - int(escape)], last[:-1]))
            run = places - 1 - before  # backslashes directly before each byte
            quotes &= run % 2 == 0
            escape = bool((len(part) - 1 - last[-1]) % 2)
        inside = np.logical_xor.accumulate(quotes) ^ quoted
        opens = ((part == ord("[")) | (part == ord("{"))) & ~inside
        yield int(np.count_nonzero(opens)) + int(np.count_nonzero(quotes & inside))
        quoted = bool(inside[-1])


def dump_line(record: object) -> bytes:
    """A record as one line of ASCII, because some readers end lines at characters such as U+2028."""
    return json.dumps(record, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def kind(value: object) -> str:
    """The type of a JSON value, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_infinity(name: str) -> None:
    if name != "NaN":
        _no_constant(name)


def _integer(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**64:
        raise ValueError("an integer does not fit into 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a 64-bit float")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} occurs twice in one object")
            seen.add(name)
    return record


# Hooks in Python also for numbers, because the interpreter can switch threads between their calls.
_HOOKS: dict[str, Any] = {
    "parse_constant": _no_constant,
    "parse_int": _integer,
    "parse_float": _float,
    "object_pairs_hook": _unique_names,
}
_HOOKS_OF_TABLES = {**_HOOKS, "parse_constant": _no_infinity}


def _check_nesting(value: object, *, strings: bool) -> None:
    """Walk level by level, so that depth costs no stack. strings: they may hold lone surrogates."""
    level, depth = [value], 0
    while level:
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(
                        "a string holds half of a surrogate pair; write the whole character"
                    ) from error
            elif isinstance(item, (dict, list)):
                if item and depth == MAX_NESTING:
                    raise ValueError(f"nested more than {MAX_NESTING} deep")
                values = item if isinstance(item, list) else item.values()
                kinds = (dict, list, str) if strings else (dict, list)
                below += [each for each in values if isinstance(each, kinds)]
                below += item if strings and isinstance(item, dict) else ()
        level, depth = below, depth + 1


def _message(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start + 1}"
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_NESTING} deep"
    return str(error)
