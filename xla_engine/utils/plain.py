"""Convert values of numpy, torch, pandas etc. to Python types. None of these has to be installed."""

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
