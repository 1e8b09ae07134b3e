"""Fields of a request: numbers without end are refused like any other wrong one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import SamplingParams

HUGE: list[Any] = [10**400, -(10**400), 10**5000, [10**400], {1: 10**400}, {10**5000: 1}, {"9" * 5000: 1}]


@pytest.mark.parametrize(
    "value", HUGE, ids=["large", "negative", "unprintable", "list", "bias", "id", "text"]
)
@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_huge_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: value})
    assert len(str(refused.value)) < 300
