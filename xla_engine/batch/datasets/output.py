"""Turn a finished file of result lines into a table: the rows of the input with their results. Mark it as finished."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from xla_engine.batch.datasets.answers import AnswerColumns
from xla_engine.batch.datasets.files import OUTPUTS, exists, is_url, kind_of, opened, put
from xla_engine.batch.datasets.pooled import TASKS, pooled_values
from xla_engine.batch.datasets.rows import RowColumns
from xla_engine.batch.datasets.tables import Table, arrow
from xla_engine.batch.resume import ResultsInOrder
from xla_engine.errors import ConfigError, OutputError
from xla_engine.utils.json_line import dump_line
from xla_engine.utils.new_file import open_new, replacing

ROW_GROUP = 16 * 1024  # rows of a Parquet row group
TEXTS = ("custom_id", "generated_text", "finish_reason", "error", "response")
COUNTS = ("num_input_tokens", "num_generated_tokens")
RESULT_COLUMNS = (*TEXTS[:3], *COUNTS, *TEXTS[3:])
IMAGES = "images_sha256"


def result_columns(*, pictures: bool, task: str | None = None) -> tuple[str, ...]:
    """The result columns of a run. pictures: whether its rows have a column of pictures. task: as in `RowColumns`."""
    if task is not None:
        return ("custom_id", *TASKS[task][1], COUNTS[0], "error")
    return (*RESULT_COLUMNS, IMAGES) if pictures else RESULT_COLUMNS


def kept_columns(names: Sequence[str], wanted: Sequence[str] | None, columns: RowColumns) -> list[str]:
    """The input columns that are copied to the output.

    Raises ConfigError for a column that does not exist, or that has the name of a result column.
    """
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f"the input has no column {name!r} to keep; it has {', '.join(names)}")
    kept = [name for name in names if wanted is None or name in wanted]
    # The input's own custom_id stands for the result's, with its type.
    own = ("custom_id",) if columns.id == "custom_id" else ()
    results = result_columns(pictures=columns.image is not None, task=columns.task)
    if taken := [name for name in kept if name in results and name not in own]:
        raise ConfigError(
            f"column {taken[0]!r} of the input has the name of a result column; use --keep-columns NAME,NAME to "
            f"leave it out"
        )
    return kept


def result_row(line: bytes) -> dict[str, Any]:
    """A result line as a row of `result_columns`.

    generated_text, finish_reason: of the first choice. error: "code: message", or None for a result.
    response: the whole body as JSON, or None for an error. images_sha256: None without pictures.
    Results of a model that pools have `pooled_values` in place of text and body.
    """
    record = json.loads(line)
    row: dict[str, Any] = dict.fromkeys(result_columns(pictures=True))
    row["custom_id"] = record["custom_id"]
    if record["error"] is not None:
        row["error"] = f"{record['error']['code']}: {record['error']['message']}"
        return row
    body = record["response"]["body"]
    if "data" in body:
        return row | pooled_values(body) | {COUNTS[0]: body["usage"]["prompt_tokens"]}
    if "output" in body:
        parts = [part for item in body["output"] for part in item.get("content") or ()]
        row["generated_text"] = "".join(part["text"] for part in parts if part["type"] == "output_text")
        row["finish_reason"] = "length" if body["status"] == "incomplete" else "stop"
        counts = ("input_tokens", "output_tokens")
    else:
        choice = body["choices"][0]
        row["generated_text"] = choice["message"]["content"] if "message" in choice else choice["text"]
        row["finish_reason"] = choice["finish_reason"]
        row[IMAGES] = body.get(IMAGES)
        counts = ("prompt_tokens", "completion_tokens")
    row |= zip(COUNTS, map(body["usage"].__getitem__, counts), strict=True)
    row["response"] = json.dumps(body)
    return row


def answer_cell(line: bytes) -> bytes:
    """The cell that holds a result line's whole answer: `response`, or `error` if it has none."""
    row = result_row(line)
    return str(row["error"] if row["response"] is None else row["response"]).encode()


def publish(
    journal: Path,
    out: str,
    table: Table | None,
    columns: Sequence[str],
    *,
    pictures: bool = False,
    answers: AnswerColumns | None = None,
    task: str | None = None,
) -> None:
    """Write a run's file of result lines to its output, which gets its final name only when it is complete.

    out: path or URL of a table or of a file of result lines. table: the input, or None if it was not a table.
    columns: the input columns to copy. pictures: whether rows have a column of pictures. answers: columns to make of
    answers in JSON. task: as in `RowColumns`.

    The bytes depend only on the results, not on how often the run was resumed. Raises OutputError, ConfigError and
    OSError.
    """
    with contextlib.closing(ResultsInOrder(journal)) as results, _published(journal, out) as file:
        if (kind := kind_of(out)) in OUTPUTS:
            names = [name for name in result_columns(pictures=pictures, task=task) if name not in columns]
            named = _Named(tuple(names), answers or AnswerColumns({}))
            rows = _joined(results, table, columns, named, typed=kind == "parquet")
            _write(rows, file, kind, named, packed=out.endswith(".gz"))
        else:
            file.writelines(line for _, line in results)


@contextlib.contextmanager
def _published(journal: Path, out: str) -> Iterator[BinaryIO]:
    """A file that replaces the path `out`, or is copied to the URL `out`, when the block ends without an error."""
    if not is_url(out):
        with replacing(Path(out)) as file:
            yield file
        return
    local = journal.with_name(f".{journal.name}.out")
    try:
        with open_new(local) as file:
            yield file
        put(local, out)
    finally:
        local.unlink(missing_ok=True)


def _write(batches: Iterator[Any], file: BinaryIO, kind: str | None, named: _Named, *, packed: bool) -> None:
    """Write record batches as a table. named: its result columns, which are all of them if there is no batch."""
    pa = arrow()
    with contextlib.ExitStack() as stack:
        if packed:
            file = stack.enter_context(cast("BinaryIO", gzip.GzipFile(fileobj=file, mode="wb", mtime=0)))
        first = next(batches, None)  # none: a shard without lines
        schema = pa.schema(list(named.types.items())) if first is None else first.schema
        every = itertools.chain([] if first is None else [first], batches)
        if kind == "parquet":
            _write_parquet(every, file, schema)
        else:
            _write_text(every, file, schema, "\t" if kind == "tsv" else ",")


@dataclass(frozen=True, slots=True)
class _Named:
    """The result columns, and those of answers in JSON."""

    results: tuple[str, ...]
    answers: AnswerColumns

    @property
    def types(self) -> dict[str, Any]:
        """The Arrow type of each column."""
        return {
            **{name: _result_type(name) for name in self.results},
            **{name: _answer_type(kind) for name, kind in self.answers.kinds.items()},
        }

    def columns(self, lines: Sequence[bytes]) -> list[Any]:
        """The columns of some result lines."""
        rows = [result_row(line) for line in lines]
        rows = [{**row, **self.answers.values(row["generated_text"])} for row in rows]
        return [arrow().array([row.get(name) for row in rows], kind) for name, kind in self.types.items()]


def _joined(
    results: ResultsInOrder, table: Table | None, columns: Sequence[str], named: _Named, *, typed: bool
) -> Iterator[Any]:
    """Record batches of input columns and result columns, for the rows that have a result. typed: as in
    `Table.batches`."""
    pa = arrow()
    coming = iter(results)
    if table is None or not columns:
        while some := list(itertools.islice(coming, 1024)):
            yield pa.record_batch(named.columns([line for _, line in some]), names=list(named.types))
        return
    ahead, number = next(coming, None), 0
    for batch in table.batches(columns, typed=typed):
        picked, lines = [], []
        for place in range(batch.num_rows):
            number += 1
            if ahead is not None and ahead[0] == number:
                picked.append(place)
                lines.append(ahead[1])
                ahead = next(coming, None)
        if not picked:
            continue
        if len(picked) < batch.num_rows:
            batch = batch.take(pa.array(picked))
        names = [*batch.schema.names, *named.types]
        yield pa.record_batch([*batch.columns, *named.columns(lines)], names=names)
    if ahead is not None:
        raise OutputError(f"there is a result for row {ahead[0]}, but the input has {number} rows")


def _result_type(name: str) -> Any:
    pa = arrow()
    if name == IMAGES:
        return pa.list_(pa.string())
    if name in ("embedding", "probs"):
        return pa.list_(pa.float32())
    if name == "score":
        return pa.float32()
    return pa.int64() if name in COUNTS else pa.string()


def _answer_type(kind: str) -> Any:
    pa = arrow()
    types = {"integer": pa.int64, "number": pa.float64, "boolean": pa.bool_}
    return types.get(kind, pa.string)()


def _write_parquet(batches: Iterator[Any], file: BinaryIO, schema: Any) -> None:
    """Write row groups of `ROW_GROUP` rows, whatever the size of the batches."""
    import pyarrow.parquet

    writer = pyarrow.parquet.ParquetWriter(file, schema)
    table = schema.empty_table()  # rows of the next group
    for batch in batches:
        table = arrow().concat_tables([table, arrow().Table.from_batches([batch], schema)])
        while len(table) >= ROW_GROUP:
            writer.write_table(table.slice(0, ROW_GROUP), row_group_size=ROW_GROUP)
            table = table.slice(ROW_GROUP)
    if len(table):
        writer.write_table(table, row_group_size=ROW_GROUP)
    writer.close()


def _write_text(batches: Iterator[Any], file: BinaryIO, schema: Any, delimiter: str) -> None:
    """Write rows of text: lists and objects as JSON, null as an empty cell."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    rows = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    rows.writerow(schema.names)
    for batch in batches:
        for row in batch.to_pylist():
            rows.writerow([written_cell(value) for value in row.values()])
    text.flush()
    text.detach()


def written_cell(value: Any) -> Any:
    """A value as CSV has it."""
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run records about a table that it has written.

    table: digest of its bytes. input: digest of all input lines and the sampling defaults. shard: I/N, or empty.
    """

    table: str
    input: str
    shard: str = ""

    def write(self, journal: Path, out: str) -> None:
        """Write the marker file of a table, as `publish` writes the table. Raises OSError."""
        with _published(journal, _place(out)) as file:
            file.write(dump_line(asdict(self)))

    @classmethod
    def of(cls, out: str) -> Finished | None:
        """Read the marker file of a table; None if there is none or it is for different content. Raises OSError."""
        if not exists(_place(out)):
            return None
        with opened(_place(out)) as file:
            try:
                found = cls(**json.loads(file.read()))
            except (ValueError, TypeError):
                return None
        return found if found.table == digest_of(out) else None


def digest_of(path: str, kind: str = "blake2b-128") -> str:
    """Digest of the bytes of a file or URL, in hex digits. kind: "blake2b-128" or "sha256". Raises OSError."""
    made = hashlib.sha256 if kind == "sha256" else partial(hashlib.blake2b, digest_size=16)
    with opened(path) as file:
        # The type of files says nothing of `readinto`.
        return hashlib.file_digest(file, made).hexdigest()  # type: ignore[arg-type]


def _place(out: str) -> str:
    """The marker's path: a hidden file, so that readers of a folder of tables ignore it."""
    folder, slash, name = out.rpartition("/")
    return f"{folder}{slash}.{name}.finished"
