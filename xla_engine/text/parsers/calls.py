"""Parse tool calls in JSON. Arguments are copied from the model's text, never re-encoded."""

import json
import re
from collections.abc import Iterator

from xla_engine.text.parsers.scan import Event, ToolArguments, ToolStart

MAX_CALL = 1 << 20  # characters of one call
_ARGUMENTS = ("arguments", "parameters")
_decoder = json.JSONDecoder()
_blank = re.compile(r"[ \t\n\r]*")


def call_events(text: str) -> list[Event] | None:
    """The events of one call, {"name": ..., "arguments": ...}; None if the text is not a call."""
    try:
        members = dict(_members(text, _skip(text, 0)))
        name = json.loads(members["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name:
        return None
    raw = next((members[key] for key in _ARGUMENTS if key in members), "{}")
    if raw.startswith('"'):  # some models write the arguments as a JSON string
        raw = str(json.loads(raw))
    return [ToolStart(name), ToolArguments(raw)]


def list_events(text: str, *, separator: str | None = None) -> list[Event] | None:
    """The events of several calls: a JSON list, or objects with a separator; None if the text is neither."""
    try:
        pieces = list(_values(text, separator))
    except (ValueError, RecursionError):
        return None
    found = [call_events(piece) for piece in pieces]
    if not found or any(events is None for events in found):
        return None
    return [event for events in found for event in events or ()]


def _values(text: str, separator: str | None) -> Iterator[str]:
    """The raw text of each value of a list, or of separated values."""
    place = _skip(text, 0)
    is_list = text.startswith("[", place)
    if is_list:
        place, separator = _skip(text, place + 1), ","
    while True:
        _, end = _value(text, place)
        yield text[place:end]
        place = _skip(text, end)
        if separator is not None and text.startswith(separator, place):
            place = _skip(text, place + len(separator))
            continue
        if is_list and not text.startswith("]", place):
            raise ValueError("the list does not end")
        if text[place + is_list :].strip():
            raise ValueError("there is more")
        return


def _members(text: str, place: int) -> Iterator[tuple[str, str]]:
    """The names and raw values of an object that spans the whole text."""
    if not text.startswith("{", place):
        raise ValueError("no object")
    place = _skip(text, place + 1)
    while not text.startswith("}", place):
        name, place = _value(text, place)
        place = _skip(text, place)
        if not isinstance(name, str) or not text.startswith(":", place):
            raise ValueError("no member")
        place = _skip(text, place + 1)
        _, end = _value(text, place)
        yield name, text[place:end]
        place = _skip(text, end)
        if text.startswith(",", place):
            place = _skip(text, place + 1)
        elif not text.startswith("}", place):
            raise ValueError("the object does not end")
    if text[place + 1 :].strip():
        raise ValueError("there is more")


def _value(text: str, place: int) -> tuple[object, int]:
    if place >= len(text) or len(text) > MAX_CALL:
        raise ValueError("no value")
    value, end = _decoder.raw_decode(text, place)
    return value, end


def _skip(text: str, place: int) -> int:
    found = _blank.match(text, place)
    return place if found is None else found.end()
