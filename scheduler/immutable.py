"""A base for immutable records."""

from typing import TypeVar

T = TypeVar("T", bound="Immutable")


class Immutable:
    """An immutable record: a deep copy of an object that holds it shares it."""

    __slots__ = ()

    def __deepcopy__(self: T, memo: dict[int, object]) -> T:
        return self
