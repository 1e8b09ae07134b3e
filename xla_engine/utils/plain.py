"""Values of numpy, torch, pandas etc. and of JSON as Python numbers. None of these has to be installed."""

import operator
from typing import Any

_OWN = frozenset({str, int, float, bool, bytes, list, tuple, dict, type(None)})


def plain(value: Any) -> Any:
    """Convert a scalar or array of another library to a Python number or list; return other values unchanged.

    Items of a list are not converted.
    """
    if type(value) in _OWN:
        return value
    for convert in ("tolist", "to_pylist"):  # numpy, torch, jax, pandas; pyarrow
        if callable(method := getattr(value, convert, None)):
            return method()
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__array__"):
        return value.__array__().tolist()
    return value


def integer_of(value: Any) -> int | None:
    """The integer that a number is: 2 for 2 and for 2.0, which pandas makes of 2 in a column with gaps.

    None for anything else, such as 2.5, text and booleans.
    """
    value = plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_missing(value: Any) -> bool:
    """Whether a value of a table stands for none: null, or NaN, which pandas puts into gaps."""
    return value is None or (isinstance(value, float) and value != value)
