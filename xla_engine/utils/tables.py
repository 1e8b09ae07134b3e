"""Tables in plain text."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """One line per row, with cells padded to aligned columns, two spaces apart.

    rows: at least one, all of the same length. right: columns (from 0) to align right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(pad(row, widths, right)).rstrip() for row in rows]


def figure(value: float) -> str:
    """A number with three significant digits, or all digits before the point: 0.0123, 12.3, 1240."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def pad(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    """The cells of a row, each as wide as its column."""
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
