"""Records that never change."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound="Immutable")


class Immutable:
    """A record that never changes: what is copied goes on to hold the record itself."""

    __slots__ = ()

    def __deepcopy__(self: T, memo: dict[int, object]) -> T:
        return self
