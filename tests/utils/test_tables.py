"""Tables in plain text."""

from __future__ import annotations

from xla_engine.utils.tables import aligned

ROWS = [("name", "n", "about"), ("a", "10", ""), ("longer", "7", "x y")]


def test_columns_line_up_on_the_side_asked_for() -> None:
    assert aligned(ROWS) == ["name    n   about", "a       10", "longer  7   x y"]
    assert aligned(ROWS, right=(1,)) == ["name     n  about", "a       10", "longer   7  x y"]
    assert aligned(ROWS[1:], right=range(3)) == ["     a  10", "longer   7  x y"]


def test_a_table_of_one_row_is_a_line() -> None:
    assert aligned([("a", "b")]) == ["a  b"]
