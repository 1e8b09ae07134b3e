"""Values in error messages."""

from collections.abc import Iterator

_LONGEST = 80


def shown(value: object) -> str:
    """`repr` of a value, cut to 80 characters. A large value takes no longer than a small one."""
    parts, size = [], 0
    try:
        for part in _written(value):
            parts.append(part)
            size += len(part)
            if size > _LONGEST:
                break
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return f"{type(value).__name__} with an integer too long to show"
    text = "".join(parts)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _written(value: object) -> Iterator[str]:
    """The parts of a `repr`; only as much of it is made as is read."""
    if type(value) is str or type(value) is bytes:
        yield repr(value[: _LONGEST + 1])
    elif type(value) is list or type(value) is tuple:
        yield "[" if isinstance(value, list) else "("
        for place, each in enumerate(value):
            yield ", " if place else ""
            yield from _written(each)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif type(value) is dict:
        yield "{"
        for place, (name, each) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _written(name)
            yield ": "
            yield from _written(each)
        yield "}"
    else:
        yield repr(value)
