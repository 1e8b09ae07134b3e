"""Append whole result lines to a file; read which input lines a file has finished, and read it in their order.

A process may die at any moment. It then leaves whole lines and at most one torn piece at the end of the file: part of
a line, or, in a gzip file, part of a member of about 64 KiB of lines. `FinishedLines.read` first checks every line,
whose `id` gives the number of its input line and a hash of its bytes. If the file holds only results, the torn piece
is cut off; any other file is left as it is.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from xla_engine.batch.lines import LineIndex
from xla_engine.batch.record_ids import parse_record_id
from xla_engine.errors import ResumeError
from xla_engine.utils.new_file import open_new

# uncompressed size of a gzip member: at most this much work is lost if the run is killed
MEMBER_BYTES = 1 << 16
_BLOCK = 1 << 20
_BEGINNING = b'{"id": "batch_req_'  # of every result line


class Sink:
    """Appends whole lines to a file, from its position on. Each `write` hands them to the operating system.

    packed: lines become gzip members of `MEMBER_BYTES`, each written at once, the last one by `close`. Members are
    cut by size alone, so two runs with the same lines write the same bytes.
    written: bytes written to the file.
    """

    def __init__(self, file: BinaryIO, *, packed: bool) -> None:
        self._file, self._packed = file, packed
        self._held = bytearray()  # lines of the next member
        self.written = 0

    def write(self, data: bytes) -> None:
        if not self._packed:
            self._append(data)
            return
        self._held += data
        if len(self._held) >= MEMBER_BYTES:
            self._write_member()

    def close(self) -> None:
        if self._held:
            self._write_member()
        _sync(self._file)

    def _write_member(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        self._append(gzip.compress(held, compresslevel=6, mtime=0))

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self.written += len(data)


def _sync(file: BinaryIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # pipes and consoles cannot sync
        os.fsync(file.fileno())


def is_packed(path: Path | str) -> bool:
    """Whether a file of this name is a gzip file."""
    return str(path).endswith(".gz")


class FinishedLines:
    """Input lines that already have an output, by line number.

    results, errors: the number of each. created, system_fingerprint: of the first result; None without one.
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
        """The digest of a finished line; None if the line is not finished."""
        return self._digests.get(number)

    def read(self, path: Path, *, drop_errors: bool = False) -> None:
        """Add the lines of an earlier run's file, which may be absent or torn at its end.

        drop_errors: remove error lines from the file, so that they run again. Raises ResumeError for a file that no
        run wrote, and leaves it unchanged. Raises OSError.
        """
        if not path.exists():
            return
        end, size = _whole_part(path)
        errors = last = 0
        try:
            for _, record in result_lines(path, size):
                number = self._add(record, path, skip_errors=drop_errors)
                errors += record["error"] is not None
                last = max(last, number)
        except ResumeError:
            raise
        except ValueError as error:
            raise ResumeError(_no_result(path, str(error))) from error
        cut_torn_end(path, end)
        self.ordered_from = min(self.ordered_from, last) if self.ordered_from else last
        if drop_errors and errors:
            _rewrite_without_errors(path)

    def _add(self, record: dict[str, Any], path: Path, *, skip_errors: bool) -> int:
        identity = parse_record_id(record.get("id"))
        if identity is None or "error" not in record or "response" not in record:
            raise ResumeError(_no_result(path, "a line has no id, response and error"))
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
            try:
                body = record["response"]["body"]
                created, fingerprint = body["created"], body["system_fingerprint"]
            except (KeyError, TypeError) as error:
                raise ResumeError(_no_result(path, f"the result of line {number} has no body")) from error
            self.created, self.system_fingerprint = created, fingerprint
        return number


def result_lines(path: Path | str, size: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and object of each non-blank JSON line of a file, which is gzip if named .gz.

    size: uncompressed bytes to read; None for all. Raises ValueError, naming the line, for a line that is not an
    object with a custom_id, and OSError.
    """
    for number, line in enumerate(_lines(path, size), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            ending = "" if line.endswith(b"\n") else "; the file may be truncated"
            raise ValueError(f"line {number}: not JSON ({error}){ending}") from error
        if not isinstance(record, dict) or not isinstance(record.get("custom_id"), str):
            raise ValueError(f"line {number}: not a result line: no custom_id")
        yield number, record


def cut_torn_end(path: Path, end: int) -> None:
    """Truncate a file to its whole lines or gzip members, which end at byte `end`.

    Raises ResumeError if the rest is not the beginning of a result.
    """
    with open(path, "r+b") as file:
        if end == file.seek(0, os.SEEK_END):
            return
        file.seek(end)
        piece = file.read(_BLOCK)
        if is_packed(path):
            piece = zlib.decompressobj(wbits=31).decompress(piece, len(_BEGINNING))
        if piece[: len(_BEGINNING)] != _BEGINNING[: len(piece)]:
            raise ResumeError(_no_result(path, "its last line is truncated and does not begin like a result"))
        os.ftruncate(file.fileno(), end)
        _sync(file)


def _no_result(path: Path, why: str) -> str:
    return f"{path} is not a file of `xla-engine run` ({why}); nothing was changed: name another file with -o"


def _whole_part(path: Path) -> tuple[int, int]:
    """Where the last whole line or gzip member ends, and how many uncompressed bytes come before."""
    with open(path, "rb") as file:
        if is_packed(path):
            return _whole_members(file, path)
        end = _whole_lines(file)
        return end, end


def _whole_lines(file: BinaryIO) -> int:
    """Size of the file up to and including its last newline."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _whole_members(file: BinaryIO, path: Path) -> tuple[int, int]:
    """Size of the file up to the end of its last complete gzip member, compressed and uncompressed."""
    end = size = position = unpacked = 0
    member = zlib.decompressobj(wbits=31)
    data = file.read(_BLOCK)
    while data:
        try:
            unpacked += len(member.decompress(data, _BLOCK))
        except zlib.error as error:
            why = f"it is damaged at byte {position}: {error}"
            raise ResumeError(_no_result(path, why)) from error
        rest = member.unused_data if member.eof else member.unconsumed_tail
        position += len(data) - len(rest)
        if member.eof:
            end, size, member = position, unpacked, zlib.decompressobj(wbits=31)
        data = rest or file.read(_BLOCK)
    return end, size


def file_lines(path: Path | str) -> Iterator[bytes]:
    """The lines of a file, each with its newline, and what follows the last newline. Raises OSError."""
    try:
        yield from _lines(path)
    except (EOFError, zlib.error) as error:
        raise OSError(f"{path} is damaged or truncated: {error}") from error


def _lines(path: Path | str, size: int | None = None) -> Iterator[bytes]:
    """Lines of a file, decompressed; only of the first `size` bytes if given."""
    with gzip.open(path) if is_packed(path) else open(path, "rb") as file:
        while (size is None or size > 0) and (line := file.readline()):
            size = None if size is None else size - len(line)
            yield line


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without a torn end, each with its newline. Raises ResumeError and OSError."""
    _, size = _whole_part(path)
    return _lines(path, size)


def _rewrite_without_errors(path: Path) -> None:
    """Replace the file atomically by one without error lines: a process that dies leaves one or the other."""
    kept = path.with_name(f".{path.name}.kept")
    with open_new(kept, path.stat().st_mode & 0o777) as file:
        sink = Sink(file, packed=is_packed(path))
        for line in _lines(path):
            if line.strip() and json.loads(line)["error"] is None:
                sink.write(line)
        sink.close()
    os.replace(kept, path)


class ResultsInOrder:
    """Result lines sorted by the number of their input line. Takes 16 bytes of memory a line.

    A gzip file is first decompressed into a temporary file. Raises ResumeError for a file with anything but whole
    result lines, or with two results of one input line, and OSError.
    """

    def __init__(self, path: Path, check: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        """check: called with the number and the object of each line; its exceptions propagate."""
        self._path = path
        self._file = _unpacked(path) if is_packed(path) else open(path, "rb")  # noqa: SIM115, closed by `close`
        try:
            self._numbers, self._offsets = self._read(check)
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each line, including its newline."""
        last = 0
        for place in self._order():
            number = self._numbers[place]
            if number == last:
                raise ResumeError(f"{self._path}: line {number} of the input has two results")
            last = number
            self._file.seek(self._offsets[place])
            yield number, self._file.readline()

    def _order(self) -> Iterator[int]:
        numbers = self._numbers
        places = range(len(numbers))
        is_sorted = all(numbers[place - 1] <= numbers[place] for place in places[1:])
        return iter(places if is_sorted else sorted(places, key=numbers.__getitem__))

    def _read(self, check: Callable[[int, dict[str, Any]], None] | None) -> tuple[array[int], array[int]]:
        numbers, offsets = array("Q"), array("Q")
        offset = 0
        while line := self._file.readline():
            number, record = self._parse(line, len(numbers) + 1)
            if check is not None:
                check(number, record)
            numbers.append(number)
            offsets.append(offset)
            offset += len(line)
        return numbers, offsets

    def _parse(self, line: bytes, place: int) -> tuple[int, dict[str, Any]]:
        try:
            record = json.loads(line)
            identity = parse_record_id(record["id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            identity = None
        if identity is None or not line.endswith(b"\n"):
            raise ResumeError(f"{self._path}: line {place} is not a complete result line of `xla-engine run`")
        return identity[0], record

    def close(self) -> None:
        self._file.close()


def _unpacked(path: Path) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by its owner)
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, file)
    except (EOFError, gzip.BadGzipFile) as error:
        file.close()
        raise ResumeError(f"{path} is damaged or truncated: {error}") from error
    file.seek(0)
    return cast("BinaryIO", file)
