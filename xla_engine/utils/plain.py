"""Values of numpy, torch, pandas and their like, in Python's own types. None of these has to be installed."""

from __future__ import annotations

import operator
from typing import Any

_OWN = frozenset({str, int, float, bool, bytes, list, tuple, dict, type(None)})


def plain(value: Any) -> Any:
    """A scalar or array of another library as a Python number or list; everything else as it is.

    What is in a list is left as it is.
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
