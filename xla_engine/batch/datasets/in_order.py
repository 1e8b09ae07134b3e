"""Read the lines of a result file in the order of the input."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from xla_engine.batch.results import parse_record_id
from xla_engine.batch.resume import is_packed
from xla_engine.errors import ResumeError


class ResultsInOrder:
    """Result lines sorted by the number of their input line. Takes 16 bytes of memory a line.

    A gzip file is first decompressed into a temporary file. Raises ResumeError for a file with anything but whole
    result lines, or with two results of one input line, and OSError.
    """

    def __init__(self, path: Path, check: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        """check: called with the number and the object of each line; its exceptions propagate."""
        self._path = path
        self._file = _unpacked(path) if is_packed(path) else _plain(path)
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

    def __enter__(self) -> ResultsInOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(path: Path) -> BinaryIO:
    return open(path, "rb")


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
