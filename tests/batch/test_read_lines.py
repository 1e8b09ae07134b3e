"""Read lines: all line endings split alike, and a line that is too long is never kept in memory."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xla_engine.batch.lines import Line, count_lines, read_lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n \t\r\n\n", []),
        (b"a", [(1, b"a")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\nb\r\n", [(1, b"a"), (3, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\xef\xbb\xbf\na\n", [(2, b"a")]),
        (b"12345\n123456\r\n", [(1, b"12345"), (2, None)]),
        (b"12345\r\n12345", [(1, b"12345"), (2, b"12345")]),
        (b"1234567\n1", [(1, None), (2, b"1")]),
        (b"1234567890123", [(1, None)]),
        (b"a\x0cb\x1cc\n", [(1, b"a\x0cb\x1cc")]),
    ],
)
def test_read_lines(data: bytes, lines: list[tuple[int, bytes | None]]) -> None:
    assert [(line.number, line.raw) for line in read_lines(io.BytesIO(data), 5)] == lines


@given(
    st.lists(st.binary(max_size=12).filter(lambda raw: b"\n" not in raw and b"\r" not in raw)), st.booleans()
)
def test_read_lines_agrees_with_split(raws: list[bytes], crlf: bool) -> None:
    data = (b"\r\n" if crlf else b"\n").join(raws)
    expected = [
        (n, raw if len(raw) <= 8 else None) for n, raw in enumerate(raws, 1) if raw.strip() or len(raw) > 8
    ]
    assume(not data.startswith(b"\xef\xbb\xbf"))
    assert [(line.number, line.raw) for line in read_lines(io.BytesIO(data), 8)] == expected
    assert count_lines(io.BytesIO(data), 8) == (len(expected) if data else None)


def test_a_10_mb_line_is_never_held() -> None:
    source = io.BytesIO(b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n{"prompt": "after"}\n')
    tracemalloc.start()
    first, second = read_lines(source, 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.raw, first.size) == (None, 10_000_015)
    assert second == Line(2, 19, b'{"prompt": "after"}')
    assert peak < 4 * 2**20
