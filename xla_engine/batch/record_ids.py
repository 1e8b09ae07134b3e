"""The ids of output lines.

The `id` of an output line contains the input line's number and a hash of its bytes, so an output file alone tells
which lines of which input are done (`xla_engine.batch.resume` reads it).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from xla_engine.batch.lines import Line
from xla_engine.utils.json_line import dump_line

_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})_([0-9a-f]{16})")


def line_digest(raw: bytes | None, size: int, salt: bytes = b"") -> int:
    """A 64-bit hash of an input line, or of its size if the line was too long to keep.

    salt: at most 16 bytes; a hash of everything else that the results depend on.
    """
    data = b"%d" % size if raw is None else raw
    return int.from_bytes(blake2b(data, digest_size=8, salt=salt).digest(), "big")


def salt_of(defaults: Mapping[str, Any] | None) -> bytes:
    """The salt of `line_digest` for the given sampling defaults."""
    return blake2b(dump_line(dict(defaults or {})), digest_size=16).digest()


class DigestedLines:
    """Passes input lines through, and keeps a digest of them and of the sampling defaults. size: of it, in bytes."""

    def __init__(self, lines: Iterable[Line], defaults: Mapping[str, Any] | None, *, size: int = 16) -> None:
        self._lines = lines
        self._salt = salt_of(defaults)
        self._digest = blake2b(digest_size=size)

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines:
            self._digest.update(line_digest(line.raw, line.size, self._salt).to_bytes(8, "big"))
            yield line

    @property
    def digest(self) -> str:
        """Of all lines so far."""
        return self._digest.hexdigest()


def record_id(line: int, digest: int) -> str:
    return f"batch_req_{line}_{digest:016x}"


def parse_record_id(value: object) -> tuple[int, int] | None:
    """Line number and digest of a `record_id`; None for anything else."""
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else (int(match[1]), int(match[2], 16))
