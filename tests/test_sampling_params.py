"""Fields of a request: numbers without end are refused like any other wrong one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
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


def test_a_fields_limits_have_names_that_are_read() -> None:
    found = {name for each in fields(SamplingParams) for name in each.metadata}
    assert found == {"integers", "numbers", "note", "none"}


def test_values_of_numpy_are_numbers_and_lists() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        max_tokens=np.array(7),
        seed=np.uint8(4),
        ignore_eos=np.bool_(True),
        stop=np.array(["a", "b"]),
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids=[np.int32(3), 5],
        logit_bias={np.int64(3): np.float64(1.5)},
    )
    assert given == SamplingParams(
        temperature=0.5,
        top_k=3,
        max_tokens=7,
        seed=4,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        allowed_token_ids=[3, 5],
        logit_bias={3: 1.5},
    )
    assert type(given.temperature) is float and type(given.max_tokens) is int
    with pytest.raises(InvalidRequestError, match="top_k must be an integer"):
        SamplingParams(top_k=np.float64(2.5))
