"""The flat table is a dict with fewer bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xla_engine.batch.lines import LineIndex

keys = st.integers(1, 2**64 - 1) | st.integers(1, 20) | st.integers(2**64 - 20, 2**64 - 1)


@given(st.lists(st.tuples(keys, st.integers(0, 2**64 - 1))))
def test_it_is_a_dict(pairs: list[tuple[int, int]]) -> None:
    table: LineIndex = LineIndex()
    model: dict[int, int] = {}
    for key, value in pairs:
        assert table.get(key) == model.get(key)
        assert table.setdefault(key, value) == model.setdefault(key, value)
        assert table.get(key) == model[key]
    assert len(table) == len(model)


def test_it_grows() -> None:
    table = LineIndex()
    for number in range(1, 50_000):
        table.setdefault(number, 3 * number)
    assert len(table) == 49_999 and all(table.get(number) == 3 * number for number in range(1, 50_000))
    assert table.get(50_000) is None
