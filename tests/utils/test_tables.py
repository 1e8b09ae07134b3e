"""Tables in plain text."""

from __future__ import annotations

from xla_engine.utils.tables import aligned, figure

ROWS = [("name", "n", "about"), ("a", "10", ""), ("longer", "7", "x y")]


def test_columns_line_up_on_the_side_asked_for() -> None:
    assert aligned(ROWS) == ["name    n   about", "a       10", "longer  7   x y"]
    assert aligned(ROWS, right=(1,)) == ["name     n  about", "a       10", "longer   7  x y"]
    assert aligned(ROWS[1:], right=range(3)) == ["     a  10", "longer   7  x y"]


def test_a_figure_is_short_and_has_no_exponent() -> None:
    values = [0.0, 0.01234, 9.876, 123.4, 999.4, 999.6, 1240.0, 87654.3]
    assert [figure(value) for value in values] == [
        "0",
        "0.0123",
        "9.88",
        "123",
        "999",
        "1000",
        "1240",
        "87654",
    ]


def test_a_table_of_one_row_is_a_line() -> None:
    assert aligned([("a", "b")]) == ["a  b"]
