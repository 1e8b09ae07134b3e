"""The requests that were to run: the lines of an input file, or the rows of a table."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from xla_engine.batch.datasets.files import is_table
from xla_engine.batch.datasets.output import result_columns, written_cell
from xla_engine.batch.datasets.rows import RowColumns, row_lines
from xla_engine.batch.datasets.tables import Table
from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.receipts import request_in, sha256_of
from xla_engine.batch.resume import is_packed
from xla_engine.batch.shards import Shard
from xla_engine.openai.requests import custom_id_of
from xla_engine.receipts.report import Objection
from xla_engine.utils.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An input file.

    columns: those of a table that form a request, as for `run`. shard: whose receipts they are; None for all lines.
    """

    path: Path | str
    columns: RowColumns = field(default_factory=RowColumns)
    shard: Shard | None = None

    @classmethod
    def of(cls, path: Path | str, columns: Mapping[str, Any] | None, shard: str | None) -> Asked:
        """Raises ConfigError."""
        given = dict(columns or {})
        return cls(
            path=path,
            columns=RowColumns(**given | {"sampling": tuple(given.get("sampling") or ())}),
            shard=None if shard is None else Shard.parse(shard),
        )

    @property
    def table(self) -> Table | None:
        """None for a file of lines. Raises ConfigError and OSError."""
        asks = any((self.columns.prompt, self.columns.template, self.columns.id, self.columns.image))
        return Table(str(self.path)) if asks or is_table(str(self.path)) else None

    def lines(self) -> Iterator[Line]:
        """The lines that were to run. Raises ConfigError and OSError."""
        for line in self._lines():
            if self.shard is None or self.shard.owns(custom_id_of(line.raw, line.number)):
                yield line

    def _lines(self) -> Iterator[Line]:
        if (table := self.table) is not None:
            yield from row_lines(table.rows(), self.columns.of(table.names))
            return
        with gzip.open(self.path) if is_packed(self.path) else open(self.path, "rb") as source:
            yield from read_lines(cast("BinaryIO", source))

    def other_requests(self, claims: Mapping[int, Mapping[str, Any]]) -> Iterator[Objection]:
        """Receipts whose request is not that of their line, and lines that have none. claims: receipts by line."""
        left = dict(claims)
        for line in self.lines():
            receipt = left.pop(line.number, None)
            if receipt is None:
                yield Objection(None, f"line {line.number} of {self.path} has no receipt")
            elif sha256_of(request_in(line.raw)) != sha256_of(receipt["request"]):
                yield Objection(
                    str(receipt["custom_id"]), f"the request is not that of line {line.number} of {self.path}"
                )
        for number, receipt in left.items():
            yield Objection(str(receipt["custom_id"]), f"{self.path} has no line {number}")

    def other_cells(self, results: Path | str, numbers: Sequence[int]) -> Iterator[Objection]:
        """Rows of a table of results whose copied columns are not the input's. numbers: the line of each row."""
        if (table := self.table) is None:
            return
        answers, own = Table(str(results)), set(result_columns(pictures=True)) - {"custom_id"}
        kept = [name for name in answers.names if name in table.names and name not in own]
        mine = {*numbers}
        asked = {number: row for number, row in enumerate(table.rows(kept), 1) if number in mine}
        for number, row in zip(numbers, answers.rows(["custom_id", *kept]), strict=True):
            before = asked.get(number, "")
            if isinstance(row, str) or isinstance(before, str):
                continue
            for name in kept:
                if not _same(before[name], row[name]):
                    why = (
                        f"{name} is {shown(row[name])}, in row {number} of {self.path} {shown(before[name])}"
                    )
                    yield Objection(str(row.get("custom_id")), why)


def _same(before: Any, after: Any) -> bool:
    """Whether a cell is the same in another format: numbers and booleans may be text in CSV."""
    if before == after or (before in (None, "") and after in (None, "")):
        return True
    for one, other in ((before, after), (after, before)):
        if isinstance(one, str) and isinstance(other, bool):
            return one.lower() == str(other).lower()
        if isinstance(one, str) and isinstance(other, int | float):
            try:
                return float(one) == float(other)
            except ValueError:
                return False
    return str(written_cell(before)) == str(written_cell(after))
