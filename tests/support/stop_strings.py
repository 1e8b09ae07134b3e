"""Stop strings, by their definition."""

from __future__ import annotations


def by_definition(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The first end at which a stop string is complete, and the longest that is."""
    for end in range(len(text) + 1):
        if found := [string for string in stop if text[:end].endswith(string)]:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None
