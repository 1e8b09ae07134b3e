"""Tables and pictures for notebooks. All text is escaped: it may be what a model wrote."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, TALL = 900, 40, 18  # pixels: of a picture, of the names of its lanes, of a lane
LETTER = 7  # pixels of a letter, at most
_CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap"'


class Bar(NamedTuple):
    """A stretch of steps of one lane, first and last included."""

    lane: int
    first: int
    last: int
    colour: str
    label: str
    about: str


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> str:
    """An HTML table; a cell shows as `str` gives it, None as nothing."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def picture(bars: Iterable[Bar], *, lanes: int, steps: int, caption: str) -> str:
    """An SVG of lanes by steps; a bar shows its label where there is room, and `about` under the pointer."""
    scale = (WIDTH - LEFT) / max(steps, 1)
    parts = [f'<text x="0" y="{lane * TALL + 13}" fill="gray">{lane}</text>' for lane in range(lanes)]
    for bar in bars:
        left, wide = LEFT + bar.first * scale, (bar.last + 1 - bar.first) * scale
        top = bar.lane * TALL
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max(wide - 0.5, 0.5):.1f}" height="{TALL - 2}" '
            f'fill="{bar.colour}"><title>{escape(bar.about)}</title></rect>'
        )
        if wide > LETTER * len(bar.label):
            parts.append(f'<text x="{left + 3:.1f}" y="{top + 12}" fill="white">{escape(bar.label)}</text>')
    return (
        f'<div>{escape(caption)}</div><svg width="{WIDTH}" height="{lanes * TALL}" font-family="sans-serif" '
        f'font-size="11">{"".join(parts)}</svg>'
    )


def _cell(value: object) -> str:
    return f"<td {_CELL}>{'' if value is None else escape(str(value))}</td>"
