"""The size of JSON values before any work is done on them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def counted(*given: object) -> Iterator[tuple[int, int]]:
    """Yield how many values and how many characters of strings and names were counted so far, level by level.

    A list or an object counts before its values are looked at, so whoever stops at a limit does no more work.
    """
    values = characters = 0
    level: list[Any] = list(given)
    while level:
        below: list[Any] = []
        for each in level:
            inner: Any = ()
            if isinstance(each, str):
                characters += len(each)
            elif isinstance(each, Mapping):
                values += len(each)
                characters += sum(len(name) for name in each if isinstance(name, str))
                inner = each.values()
            elif isinstance(each, Sequence):
                values += len(each)
                inner = each
            yield values, characters
            below += inner
        level = below


def is_longer(value: object, most: int) -> bool:
    """Whether a value, written as JSON, certainly has more than `most` characters: each value has at least one."""
    return any(values + characters > most for values, characters in counted(value))
