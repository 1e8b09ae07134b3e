"""Cases of one parametrised test in two tiers."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def default(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The values of a parameter: the first `count` are tested by default, the others only by `.ci/run`.

    A tuple holds the values of several parameters.
    """
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)), marks=[pytest.mark.full] * (place >= count)
        )
        for place, each in enumerate(values)
    ]


def in_ci(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The values of a parameter: those in `kept` are tested wherever the test is, the others only for a release."""
    return [pytest.param(each, marks=[pytest.mark.release] * (each not in kept)) for each in values]
