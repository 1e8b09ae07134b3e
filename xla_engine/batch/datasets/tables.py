"""Read tables as rows or as Arrow batches, in file order and in bounded memory.

pyarrow reads Parquet and Arrow. The standard library reads CSV and JSON row by row, because an unreadable row must
fail alone, and pyarrow's readers of these formats stop at it.
"""

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from xla_engine.batch.datasets.files import TableFile, table_files
from xla_engine.batch.datasets.rows import Row
from xla_engine.batch.encodings import MAX_LINE_BYTES, as_utf8, check_is_utf8
from xla_engine.batch.lines import COUNTED_BYTES
from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install
from xla_engine.utils.json_line import load_object

BATCH = 1024  # rows read at a time
CHECKED = 1 << 20  # bytes of a text file checked at a time
PICTURES = 16  # the same of columns of bytes, which are pictures


class Table:
    """All files of an input, in sequence.

    names: the columns of all files, beginning with those of the first.
    """

    def __init__(self, source: str, encoding: str | None = None) -> None:
        """encoding: of text files; by default UTF-8. Raises ConfigError and OSError."""
        self.source = source
        self._files = [replace(file, encoding=encoding) for file in table_files(source)]
        for file in self._files:
            _check_text(file)
        names = [_names(file) for file in self._files]
        for file, found in zip(self._files, names, strict=True):
            if twice := next((name for name in found if found.count(name) > 1), None):
                raise ConfigError(f"{file.name} has two columns {twice!r}; rename one")
        self.names: list[str] = list(dict.fromkeys(itertools.chain.from_iterable(names)))

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield all rows, or only some columns of them; an unreadable row is yielded as its error message."""
        wanted = self.names if columns is None else [name for name in self.names if name in columns]
        for file in self._files:
            for row in _rows(file, wanted):
                yield row if isinstance(row, str) else {name: row.get(name) for name in wanted}

    def holds_bytes(self, name: str) -> bool:
        """Whether a column holds bytes; text files have none."""
        return any(
            file.kind in ("parquet", "arrow") and holds_bytes(_types(file, [name])[name])
            for file in self._files
        )

    @property
    def num_rows(self) -> int | None:
        """The number of rows, from metadata or by counting; None for text at a URL, or if it is too large to count."""
        text = [file for file in self._files if file.kind not in ("parquet", "arrow")]
        if not all(os.path.exists(file.name) for file in text):
            return None
        if sum(os.path.getsize(file.name) for file in text) > COUNTED_BYTES:
            return None
        return sum(map(_count, self._files))

    def batches(self, columns: Sequence[str], *, typed: bool = False) -> Iterator[Any]:
        """Yield all rows as Arrow record batches of one schema; an unreadable row becomes nulls.

        typed: whether columns of CSV files that hold only numbers, or only true and false, become such columns.
        """
        schema = self._schema(columns, typed=typed)
        for file in self._files:
            yield from _batches(file, schema)

    def _schema(self, columns: Sequence[str], *, typed: bool) -> Any:
        pa = arrow()
        fields: dict[str, Any] = {}
        for file in self._files:
            for name, kind in _types(file, columns, typed=typed).items():
                known = fields.setdefault(name, kind)
                if known != kind:
                    fields[name] = (
                        kind if pa.types.is_null(known) else known if pa.types.is_null(kind) else pa.string()
                    )
        return pa.schema([(name, fields[name]) for name in columns])


def arrow() -> Any:
    """Import pyarrow. Raises ConfigError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"Parquet and Arrow files need pyarrow: {install('data')}") from error
    return pyarrow


def _names(file: TableFile) -> list[str]:
    with file.open() as source:
        if file.kind in ("csv", "tsv"):
            with _text(file, source) as text:
                return _header(file, _csv(file, text))
        if file.kind == "json":  # each row may have different fields
            rows = (row for row in _json(_lines(file, source)) if not isinstance(row, str))
            return list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        if file.kind == "parquet":
            return list(_parquet(file, source).schema_arrow.names)
        return list(_ipc(file, source)[0].names)


def _rows(file: TableFile, columns: Sequence[str]) -> Iterator[Row]:
    with file.open() as source:
        if file.kind in ("csv", "tsv"):
            with _text(file, source) as text:
                yield from _csv_rows(file, text)
        elif file.kind == "json":
            yield from _json(_lines(file, source))
        else:
            for batch in _arrow_batches(file, source, columns):
                yield from batch.to_pylist()


def _count(file: TableFile) -> int:
    with file.open() as source:
        if file.kind == "parquet":
            return int(_parquet(file, source).metadata.num_rows)
        if file.kind == "arrow":
            return sum(batch.num_rows for batch in _ipc(file, source)[1])
    return sum(1 for _ in _rows(file, ()))


def _batches(file: TableFile, schema: Any) -> Iterator[Any]:
    pa = arrow()
    if file.kind in ("parquet", "arrow"):
        with file.open() as source:
            for batch in _arrow_batches(file, source, schema.names):
                columns = [
                    batch.column(field.name).cast(field.type)
                    if field.name in batch.schema.names
                    else pa.nulls(batch.num_rows, field.type)
                    for field in schema
                ]
                yield pa.record_batch(columns, schema=schema)
        return
    rows = _rows(file, schema.names)
    while some := list(itertools.islice(rows, BATCH)):
        held = [{} if isinstance(row, str) else row for row in some]
        columns = [
            pa.array([_plain(row.get(field.name), field.type) for row in held], field.type)
            for field in schema
        ]
        yield pa.record_batch(columns, schema=schema)


def _plain(value: Any, kind: Any) -> Any:
    """Convert a value of a text file to a column's type; in a text column, other values become JSON."""
    is_text = str(kind) in ("string", "large_string")
    if isinstance(value, str) and not is_text:  # of a CSV file, as `_types` found it
        return _meant(value)
    return value if value is None or isinstance(value, str) or not is_text else json.dumps(value)


def _types(file: TableFile, columns: Sequence[str], *, typed: bool = False) -> dict[str, Any]:
    """The Arrow types of a file's columns; for text files, inferred from all values. typed: as in `Table.batches`."""
    pa = arrow()
    if file.kind in ("parquet", "arrow"):
        with file.open() as source:
            schema = _parquet(file, source).schema_arrow if file.kind == "parquet" else _ipc(file, source)[0]
            return {name: schema.field(name).type if name in schema.names else pa.null() for name in columns}
    found: dict[str, set[type]] = {name: set() for name in columns}
    for row in _rows(file, columns):
        if not isinstance(row, str):
            for name in columns:
                value = row.get(name)
                if typed and file.kind in ("csv", "tsv") and isinstance(value, str):
                    value = _meant(value)
                found[name].add(type(value))
    return {name: _type_of(kinds - {type(None)}) for name, kinds in found.items()}


_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII)  # 007 is a name
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def _meant(text: str) -> int | float | bool | str:
    """The value that a cell of a CSV file stands for."""
    if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    if _NUMBER.fullmatch(text) and not text.lstrip("-").isdigit():
        return float(text)
    return _TRUTHS.get(text, text)


def _type_of(kinds: set[type]) -> Any:
    pa = arrow()
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds <= {int, float} else pa.string()


def _parquet(file: TableFile, source: BinaryIO) -> Any:
    pa = arrow()
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(source)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file.name} is not a Parquet file: {error}") from error


def _ipc(file: TableFile, source: BinaryIO) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of an Arrow file, or of the Arrow stream that `datasets` saves under this extension."""
    pa = arrow()
    try:
        reader = pa.ipc.open_file(source)
        return reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
    try:
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file.name} is not an Arrow file: {error}") from error


def _arrow_batches(file: TableFile, source: BinaryIO, columns: Sequence[str]) -> Iterator[Any]:
    if file.kind == "parquet":
        opened = _parquet(file, source)
        names = [name for name in columns if name in opened.schema_arrow.names]
        yield from opened.iter_batches(batch_size=_rows_at_once(opened.schema_arrow, names), columns=names)
        return
    schema, batches = _ipc(file, source)
    names = [name for name in columns if name in schema.names]
    for batch in batches:
        step = _rows_at_once(schema, names)
        yield from (batch.select(names).slice(start, step) for start in range(0, batch.num_rows, step))


def _rows_at_once(schema: Any, names: Sequence[str]) -> int:
    return PICTURES if any(holds_bytes(schema.field(name).type) for name in names) else BATCH


def holds_bytes(kind: Any) -> bool:
    """Whether values of an Arrow type are bytes, or lists or objects with bytes."""
    pa = arrow()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(holds_bytes(kind.field(index).type) for index in range(kind.num_fields))


def _text(file: TableFile, source: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(as_utf8(source, file.name, file.encoding), encoding="utf-8", newline="")


def _lines(file: TableFile, source: BinaryIO) -> BinaryIO:
    """JSON lines; a wrong one in UTF-8 fails alone."""
    if file.encoding is not None:
        return as_utf8(source, file.name, file.encoding)
    check_is_utf8(source, file.name)
    return source


def _check_text(file: TableFile) -> None:
    """Raise OSError, before anything runs, if a CSV file on this machine is not in its encoding."""
    if file.kind in ("csv", "tsv") and os.path.exists(file.name):
        with file.open() as source:
            text = as_utf8(source, file.name, file.encoding)
            while text.read(CHECKED):
                pass


def _csv(file: TableFile, text: io.TextIOWrapper) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    return csv.reader(text, delimiter="\t" if file.kind == "tsv" else ",", strict=True)


def _header(file: TableFile, rows: Iterator[list[str]]) -> list[str]:
    try:
        return next(rows, [])
    except csv.Error as error:
        raise ConfigError(f"{file.name}: the header line cannot be read: {error}") from error


def _csv_rows(file: TableFile, text: io.TextIOWrapper) -> Iterator[Row]:
    rows = _csv(file, text)
    names = _header(file, rows)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield f"the row is not CSV: {error}"
            continue
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(names):
            yield f"the row has {len(row)} fields, not the {len(names)} of the header line"
        else:
            yield {name: value or None for name, value in zip(names, row, strict=True)}


def _json(source: BinaryIO) -> Iterator[Row]:
    """Rows of JSON lines, or of one array of objects."""
    lines = iter(source)
    first = next((line for line in lines if line.strip()), b"")
    if first.lstrip().startswith(b"["):
        try:
            rows = json.loads(first + b"".join(lines))
        except ValueError as error:
            raise ConfigError(
                f"the array of rows is not JSON: {error}; with one object per line, only the wrong lines fail"
            ) from error
        for row in rows:
            yield row if isinstance(row, dict) else "the row is not an object"
        return
    for line in itertools.chain([first] if first else [], lines):
        if line.strip():
            try:
                yield load_object(line.removeprefix(b"\xef\xbb\xbf"), nan_is_null=True)
            except ValueError as error:
                yield str(error)
