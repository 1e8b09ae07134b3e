"""Read the lines of an input file lazily: bytes, then requests. Index them in little memory."""

import gzip
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from xla_engine.batch.encodings import MAX_LINE_BYTES
from xla_engine.openai.requests import LineError, LineRequest, line_error, parse_line

COUNTED_BYTES = 256 * 2**20  # lines of larger files are not counted beforehand
_MULTIPLIER = 0x9E3779B97F4A7C15  # Fibonacci hashing: 2**64 divided by the golden ratio


@dataclass(frozen=True, slots=True)
class Line:
    """One input line: its number from 1, its size in bytes, and its bytes, or None if it was too long.

    problem: for a table row that is not a valid request, the reason; None for every other line.
    images: the pictures of a table row, which `raw` names by their digests; None for every other line.
    """

    number: int
    size: int
    raw: bytes | None
    problem: str | None = None
    images: tuple[object, ...] | None = None


def read_lines(source: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the non-blank lines of a file. LF and CRLF end a line; a UTF-8 byte order mark may start it.

    A line longer than `max_line_bytes` is skipped piece by piece, so memory stays bounded. Raises OSError if the
    file cannot be read further, also for a damaged gzip file.
    """
    number = 0
    while chunk := _readline(source, max_line_bytes + 2):
        number += 1
        raw = chunk.removesuffix(b"\n").removesuffix(b"\r")
        if len(raw) > max_line_bytes:
            size = len(chunk)
            while chunk and not chunk.endswith(b"\n"):
                chunk = _readline(source, 2**16)
                size += len(chunk)
            yield Line(number, size, None)
            continue
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield Line(number, len(raw), raw)


def count_lines(source: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> int | None:
    """The number of lines that `read_lines` will yield; None if the file is too large or cannot be read twice."""
    if isinstance(source, gzip.GzipFile) or not source.seekable():
        return None
    start = source.tell()
    size = source.seek(0, os.SEEK_END) - start
    source.seek(start)
    if not 0 < size <= COUNTED_BYTES:
        return None
    total = sum(1 for _ in read_lines(source, max_line_bytes))
    source.seek(start)
    return total


class LineReader:
    """Parses lines into requests, and rejects an id that an earlier line has used.

    defaults: sampling fields for lines that do not set them.
    """

    def __init__(self, defaults: Mapping[str, Any] | None = None) -> None:
        self._defaults = dict(defaults or {})
        self._first_use = LineIndex()  # 64 bits of a custom_id's hash -> 32 more and its line

    def read(self, line: Line) -> LineRequest | LineError:
        """The request of a line, or its error. Never raises for anything in the line."""
        if line.raw is None:
            message = f"the line has {line.size} bytes, more than the limit; raise --max-line-bytes"
            return line_error(line.number, "line_too_long", message)
        request = parse_line(line.raw, line.number, self._defaults, line.images)
        if line.problem is not None:
            request = line_error(line.number, "invalid_row", line.problem, request.custom_id)
        first = self._first_line(request.custom_id, line.number)
        if first != line.number and isinstance(request, LineRequest):
            message = f"custom_id {request.custom_id!r} was already used on line {first}; ids must be unique"
            return line_error(line.number, "duplicate_custom_id", message, request.custom_id)
        return request

    def _first_line(self, custom_id: str, number: int) -> int:
        digest = int.from_bytes(blake2b(custom_id.encode(), digest_size=12).digest(), "big")
        key, check = digest >> 32 or 1, digest & 0xFFFFFFFF
        first = self._first_use.setdefault(key, check << 32 | number)
        return first & 0xFFFFFFFF if first >> 32 == check else number


def _readline(source: BinaryIO, limit: int) -> bytes:
    try:
        return source.readline(limit)
    except (EOFError, zlib.error) as error:
        raise OSError(f"damaged gzip file: {error}") from error


class LineIndex:
    """A hash map from 64-bit keys above 0 to 64-bit values: open addressing in two flat arrays.

    A million entries take 32 MB; in a dict they take more than 100 MB.
    """

    def __init__(self) -> None:
        self._bits = 10
        self._count = 0
        self._keys = array("Q", bytes(8 << self._bits))  # 0: free
        self._values = array("Q", bytes(8 << self._bits))

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        place = self._place(key)
        return self._values[place] if self._keys[place] else None

    def setdefault(self, key: int, value: int) -> int:
        """The value of `key`; sets it to `value` first if the key is missing."""
        place = self._place(key)
        if self._keys[place]:
            return self._values[place]
        self._keys[place], self._values[place] = key, value
        self._count += 1
        if 3 * self._count > 2 << self._bits:
            self._grow()
        return value

    def _place(self, key: int) -> int:
        mask = (1 << self._bits) - 1
        place = (key * _MULTIPLIER & (1 << 64) - 1) >> 64 - self._bits
        while self._keys[place] not in (0, key):
            place = place + 1 & mask
        return place

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._bits += 1
        self._keys = array("Q", bytes(8 << self._bits))
        self._values = array("Q", bytes(8 << self._bits))
        for key, value in zip(keys, values, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._values[place] = key, value
