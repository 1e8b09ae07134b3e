"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 64


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean ...?` if `name` is similar to a known name, else an empty string."""
    if not isinstance(name, str) or len(name) > _LONGEST:
        return ""
    close = get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {close[0]!r}?" if close else ""
