"""Quantiles of any number of values in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.utils.quantiles import WIDTH, Quantiles


@given(st.lists(st.floats(1e-6, 1e6), min_size=1), st.sampled_from((0.0, 0.5, 0.9, 0.99, 1.0)))
def test_quantiles_are_right_to_within_a_bucket(values: list[float], share: float) -> None:
    found = Quantiles()
    for value in values:
        found.add(value)
    exact = sorted(values)[min(int(share * len(values)), len(values) - 1)]
    assert found.at(share) == pytest.approx(exact, rel=WIDTH)
    assert (found.largest, found.count) == (max(values), len(values))
