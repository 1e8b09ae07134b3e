"""Files of result lines that grow by whole lines, and what a file that is there already says is done.

A process may die at any moment. What it leaves is a file of whole lines and at most one torn piece at its end: of a
line, or, in a gzip file, of a member of some 64 KiB of lines. `FinishedLines.read` cuts the piece off and reads the
rest: the `id` of each line names the input line it answers and a hash of its bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from xla_engine.batch.line_index import LineIndex
from xla_engine.batch.results import parse_record_id
from xla_engine.errors import ResumeError

MEMBER_BYTES = 1 << 16  # of lines in a gzip member: what a killed run may have to do again
_BLOCK = 1 << 20


class Disk:
    """The operations that change a file. Tests put one in its place that dies at each of them."""

    def write(self, file: BinaryIO, data: bytes) -> None:
        file.write(data)
        file.flush()

    def truncate(self, file: BinaryIO, size: int) -> None:
        file.truncate(size)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync(self, file: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):  # pipes and consoles cannot
            os.fsync(file.fileno())


class Sink(Protocol):
    """Takes whole lines. After `close`, or after each `write` unless it packs, they are the system's."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class PlainSink:
    """Writes each line as it comes."""

    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: bytes) -> None:
        self._disk.write(self._file, data)

    def close(self) -> None:
        self._disk.sync(self._file)


class GzipSink(PlainSink):
    """Packs lines into gzip members of `MEMBER_BYTES`, each written at once; cut by size alone, so that two runs with
    the same lines make the same bytes."""

    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        super().__init__(file, disk)
        self._held = bytearray()

    def write(self, data: bytes) -> None:
        self._held += data
        if len(self._held) >= MEMBER_BYTES:
            self._write_member()

    def close(self) -> None:
        if self._held:
            self._write_member()
        super().close()

    def _write_member(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        super().write(gzip.compress(held, compresslevel=6, mtime=0))


def is_packed(path: Path | str) -> bool:
    """Whether a file of this name is a gzip file."""
    return str(path).endswith(".gz")


def sink_of(file: BinaryIO, *, packed: bool, disk: Disk) -> Sink:
    """A sink that writes to `file` from its position on."""
    return GzipSink(file, disk) if packed else PlainSink(file, disk)


class FinishedLines:
    """Input lines that have their output, by number.

    results, errors: how many of either. created, system_fingerprint: of the first result, None without one.
    ordered_from: every ordered output that was read ends at this line or a later one.
    """

    def __init__(self) -> None:
        self.results = self.errors = 0
        self.created: int | None = None
        self.system_fingerprint: str | None = None
        self.ordered_from = 0
        self._digests = LineIndex()

    def __len__(self) -> int:
        return len(self._digests)

    def digest(self, number: int) -> int | None:
        """The digest of the line that was answered, None for a line without an answer."""
        return self._digests.get(number)

    def read(self, path: Path, disk: Disk, *, drop_errors: bool = False) -> None:
        """Add the lines of a file that a run has left, which may be torn at its end or absent.

        drop_errors: take the error lines out of the file, to be run again. Raises ResumeError for a file that no run
        of this program wrote, and OSError.
        """
        if not path.exists():
            return
        cut_torn_end(path, disk)
        errors = last = 0
        for record in _records(path):
            number = self._add(record, path, skip_errors=drop_errors)
            errors += record["error"] is not None
            last = max(last, number)
        self.ordered_from = min(self.ordered_from, last) if self.ordered_from else last
        if drop_errors and errors:
            _rewrite_without_errors(path, disk)

    def _add(self, record: dict[str, Any], path: Path, *, skip_errors: bool) -> int:
        identity = parse_record_id(record.get("id"))
        if identity is None or "error" not in record or "response" not in record:
            raise ResumeError(f"{path} holds a line that is no result of `xla-engine run`; use another file")
        number, digest = identity
        failed = record["error"] is not None
        if failed and skip_errors:
            return number
        if self._digests.setdefault(number, digest) != digest:
            raise ResumeError(
                f"{path}: line {number} of two different inputs; the files do not belong together"
            )
        self.errors += failed
        self.results += not failed
        if not failed and self.created is None:
            body = record["response"]["body"]
            self.created, self.system_fingerprint = body["created"], body["system_fingerprint"]
        return number


def cut_torn_end(path: Path, disk: Disk) -> None:
    """Shorten a file to its last whole line, or a gzip file to its last whole member."""
    with open(path, "r+b") as file:
        end = _whole_members(file, path) if is_packed(path) else _whole_lines(file)
        if end < file.seek(0, os.SEEK_END):
            disk.truncate(file, end)
            disk.sync(file)


def _whole_lines(file: BinaryIO) -> int:
    """Size of the file up to and with its last newline."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _whole_members(file: BinaryIO, path: Path) -> int:
    """Size of the file up to the end of its last complete gzip member."""
    end = position = 0
    member = zlib.decompressobj(wbits=31)
    data = file.read(_BLOCK)
    while data:
        try:
            member.decompress(data, _BLOCK)
        except zlib.error as error:
            raise ResumeError(f"{path} is damaged at byte {position} ({error}); use another file") from error
        rest = member.unused_data if member.eof else member.unconsumed_tail
        position += len(data) - len(rest)
        if member.eof:
            end, member = position, zlib.decompressobj(wbits=31)
        data = rest or file.read(_BLOCK)
    return end


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise ResumeError(
                f"{path} line {number} is no result line ({error}); use another file"
            ) from error
        yield record


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if is_packed(path) else open(path, "rb") as file:
        yield from file


def _rewrite_without_errors(path: Path, disk: Disk) -> None:
    """Replace the file by one without its error lines, at once: a process that dies leaves one or the other."""
    kept = path.with_name(f".{path.name}.kept")
    with open(kept, "wb") as file:
        sink = sink_of(file, packed=is_packed(path), disk=disk)
        for line in _lines(path):
            if json.loads(line)["error"] is None:
                sink.write(line)
        sink.close()
    disk.replace(kept, path)
