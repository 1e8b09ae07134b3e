"""Values in error messages."""

_LONGEST = 80


def shown(value: object) -> str:
    """`repr` of a value, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return f"{type(value).__name__} with an integer too long to show"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
