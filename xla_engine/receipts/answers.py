"""Read the answers of a result file, of lines or of a table, by the number of their input line."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_engine.batch.datasets.files import OUTPUTS, kind_of
from xla_engine.batch.datasets.output import result_row, written_cell
from xla_engine.batch.datasets.tables import Table, arrow
from xla_engine.batch.record_ids import parse_record_id
from xla_engine.batch.resume import file_lines
from xla_engine.errors import ReceiptError
from xla_engine.receipts.report import Objection
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.shown import shown

_NUMBER = re.compile(r"[a-z]+[-_]([1-9][0-9]{0,17})")  # the id of an answer's body


@dataclass(slots=True)
class FileAnswer:
    """An answer of the result file.

    sha256: of what the receipt's digest covers. record: its output line, in which an answer of a table has no id.
    why: what is wrong with its row besides; None if nothing is. used: whether a receipt has been found for it.
    """

    sha256: str
    record: dict[str, Any]
    why: str | None = None
    used: bool = False


Answers = tuple[dict[int, FileAnswer], list[Objection]]


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None if it is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def id_of(record: Mapping[str, Any] | None) -> str | None:
    """The custom_id of a record, if it has one."""
    name = None if record is None else record.get("custom_id")
    return name if isinstance(name, str) else None


def line_answers(path: Path | str) -> Answers:
    """The answers of a file of lines, and what is wrong with it. Raises OSError."""
    found: dict[int, FileAnswer] = {}
    rejected = []
    for place, line in enumerate(file_lines(path), 1):
        record = object_of(line)
        identity = None if record is None else parse_record_id(record.get("id"))
        if record is None or identity is None or not isinstance(record.get("custom_id"), str):
            name = id_of(record)
            rejected.append(Objection(name, f"{path} line {place}: not a whole line of results"))
        elif identity[0] in found:
            rejected.append(
                Objection(id_of(record), f"{path} line {place}: a second answer of the same line")
            )
        else:
            digest = hashlib.sha256(line.removesuffix(b"\n")).hexdigest()
            found[identity[0]] = FileAnswer(digest, record)
    return found, rejected


def table_answers(path: Path | str, receipts: Path | str) -> Answers:
    """The answers of a table that a run wrote, and what is wrong with it.

    receipts: tell the numbers of the rows that have an error, whose cells do not.

    Raises ReceiptError for a file that is no table, ConfigError without pyarrow if it is needed, and OSError.
    """
    if (kind := kind_of(str(path))) not in OUTPUTS:
        raise ReceiptError(
            f"{receipts} has the receipts of a table; name the table, a {', .'.join(OUTPUTS)} file"
        )
    if kind == "parquet":
        arrow()
    failed: dict[str, deque[int]] = defaultdict(deque)
    for number, custom_id in sorted(_failed(receipts)):
        failed[custom_id].append(number)
    found: dict[int, FileAnswer] = {}
    rejected = []
    for place, row in enumerate(_rows(path), 1):
        where = f"{path} row {place}"
        answer = row if isinstance(row, str) else _of_row(row, failed)
        if isinstance(answer, str):
            name = None if isinstance(row, str) or row.get("custom_id") is None else str(row["custom_id"])
            rejected.append(Objection(name, f"{where}: {answer}"))
            continue
        number, made = answer
        if number in found:
            rejected.append(Objection(id_of(made.record), f"{where}: a second answer of the same line"))
        else:
            found[number] = made
    return found, rejected


def _failed(receipts: Path | str) -> Iterator[tuple[int, str]]:
    """Number and custom_id of the receipts of errors."""
    for line in file_lines(receipts):
        record = object_of(line) or {}
        number, name = record.get("line"), id_of(record)
        if record.get("error") is not None and isinstance(number, int) and name is not None:
            yield number, name


def _rows(path: Path | str) -> Iterator[dict[str, Any] | str]:
    """The rows of a table, until one cannot be read."""
    with open(path, "rb"):  # a missing file is no changed one
        pass
    try:
        for row in Table(str(path)).rows():
            yield row if isinstance(row, str) else dict(row)
    except Exception as error:  # pyarrow has many, for files that were changed
        yield f"the table cannot be read: {error}"


_CELLS = ("custom_id", "response", "error")


def _of_row(row: Mapping[str, Any], failed: Mapping[str, deque[int]]) -> tuple[int, FileAnswer] | str:
    """The number and the answer of a row, or why it has none."""
    name, response, error = (None if row.get(each) is None else str(row[each]) for each in _CELLS)
    if name is None or (response is None) == (error is None):
        return "not a row of results"
    if response is None:
        if not failed.get(name):
            return "an error that no receipt has"
        number = failed[name].popleft()
        code, _, message = str(error).partition(": ")
        detail = {"code": code, "message": message, "line": number}
        record: dict[str, Any] = {"custom_id": name, "response": None, "error": detail}
    else:
        try:
            body = json.loads(response)
            found = _NUMBER.fullmatch(body["id"])
        except (ValueError, RecursionError, KeyError, TypeError):
            found = None
        if found is None:
            return "its response is not the body of an answer"
        number = int(found[1])
        whole = {"status_code": 200, "request_id": f"req_{number}", "body": body}
        record = {"custom_id": name, "response": whole, "error": None}
    digest = hashlib.sha256(str(error if response is None else response).encode()).hexdigest()
    return number, FileAnswer(digest, record, _other_cells(row, record))


def _other_cells(row: Mapping[str, Any], record: dict[str, Any]) -> str | None:
    """A result column of a row that is not that of its answer; None if all are."""
    try:
        expected = result_row(dump_line(record))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "its response is not the body of an answer"
    for column, value in expected.items():
        if column in row and _text(row[column]) != _text(value):
            return f"{column} is {shown(row[column])}, in its response {shown(value)}"
    return None


def _text(cell: Any) -> str:
    return "" if cell is None else str(written_cell(cell))
