"""Suggestions for misspelt names."""

import functools
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

_LONGEST = 64
T = TypeVar("T")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean ...?` if `name` is similar to a known name, else an empty string."""
    if not isinstance(name, str) or len(name) > _LONGEST:
        return ""
    close = get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def naming_fields(record: type[T]) -> type[T]:
    """Decorate a dataclass so that the TypeError for an unknown field suggests one."""
    own: Any = record
    make = own.__init__

    @functools.wraps(make)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        known = own.__dataclass_fields__
        for name in fields.keys() - known.keys():
            hint = did_you_mean(name, known) or f"; its fields are {', '.join(sorted(known))}"
            raise TypeError(f"{record.__name__} has no field {name!r}{hint}")
        make(self, *values, **fields)

    own.__init__ = init
    return record
