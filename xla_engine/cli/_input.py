"""Input and output of `xla-engine run`: files of requests, tables, and what the first line tells."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from xla_engine.batch.datasets.answers import AnswerColumns
from xla_engine.batch.datasets.files import OUTPUTS, exists, file_system, is_table, is_url, kind_of
from xla_engine.batch.datasets.output import Finished, digest_of, kept_columns, publish, result_columns
from xla_engine.batch.datasets.rows import RowColumns, row_lines, template_columns
from xla_engine.batch.datasets.tables import Table
from xla_engine.batch.encodings import as_utf8, check_is_utf8
from xla_engine.batch.lines import Line, count_lines, read_lines
from xla_engine.batch.output_file import Mode
from xla_engine.batch.receipts import ReceiptFile
from xla_engine.batch.record_ids import DigestedLines
from xla_engine.batch.resume import is_packed
from xla_engine.batch.shards import Shard, state_path
from xla_engine.batch.submit import reads_pictures
from xla_engine.cli._common import NotStarted, check_tokenizer
from xla_engine.cli._table_options import TableOptions
from xla_engine.errors import OutputError
from xla_engine.model_loader.pooling import default_task
from xla_engine.openai.fields import SUBMIT_FIELDS
from xla_engine.openai.requests import LineRequest, parse_line
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.parsers.chats import Chat

if TYPE_CHECKING:
    from xla_engine.batch.lines import Line
    from xla_engine.model_loader.describe import ModelDescription
    from xla_engine.open_engine import EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The input of a run. total: number of lines; None if not counted. file: None for tables. columns: those to
    keep."""

    lines: Iterator[Line]
    total: int | None
    file: BinaryIO | None
    table: Table | None = None
    columns: tuple[str, ...] = ()


@contextlib.contextmanager
def open_lines(
    source: str,
    options: TableOptions,
    max_line_bytes: int,
    *,
    count: bool = False,
    keep: bool = False,
    encoding: str | None = None,
    pooled: Pooled | None = None,
) -> Iterator[Input]:
    """Read lines from a file of requests or from a table. Raises ConfigError and OSError.

    count: whether to count the lines. keep: whether the output keeps columns. encoding: by default UTF-8. pooled: of a
    model that pools.
    """
    if is_table(source) or options.asks_for_columns:
        table = Table(source, encoding)
        yield _table_lines(table, options, max_line_bytes, count=count, keep=keep, pooled=pooled)
    elif is_url(source):
        system, path = file_system(source)
        compression = "gzip" if is_packed(source) else None
        with system.open(path, "rb", compression=compression) as file:
            yield Input(
                lines=read_lines(_text(file, source, encoding), max_line_bytes), total=None, file=None
            )
    else:
        with open_input(source) as file:
            text = _text(file, source, encoding)
            total = count_lines(text, max_line_bytes) if count else None
            yield Input(lines=read_lines(text, max_line_bytes), total=total, file=file)


def _text(file: BinaryIO, name: str, encoding: str | None) -> BinaryIO:
    """Lines of requests; a wrong one in UTF-8 fails alone."""
    if encoding is None:
        check_is_utf8(file, name)
        return file
    return as_utf8(file, name, encoding)


def _table_lines(
    table: Table,
    options: TableOptions,
    max_line_bytes: int,
    *,
    count: bool,
    keep: bool,
    pooled: Pooled | None,
) -> Input:
    if pooled is None and (options.task or options.query_column):
        raise NotStarted("--task and --query-column are for models that pool; this one generates")
    columns = RowColumns(
        prompt=options.prompt_column,
        template=options.prompt_template,
        id=options.id_column,
        image=options.image_column,
        sampling=tuple(_names(options.sampling_columns) or ()),
        query=options.query_column,
        task=None if pooled is None else pooled.task,
        defaults={} if pooled is None else pooled.defaults,
    ).of(table.names)
    wanted = _names(options.keep_columns)
    if keep and wanted is None and columns.image is not None and table.holds_bytes(columns.image):
        wanted = [name for name in table.names if name != columns.image]
    read = [
        columns.prompt,
        columns.id,
        columns.image,
        columns.query,
        "sampling_params",
        *columns.sampling,
        *template_columns(columns.template),
    ]
    known = {each.name for each in fields(SamplingParams)}.union(SUBMIT_FIELDS)
    if unused := [name for name in table.names if name in known and name not in read]:
        click.echo(
            f"columns named like sampling fields are not used: {', '.join(unused)}; --sampling-columns "
            f"{','.join(unused)} takes them",
            err=True,
        )
    return Input(
        lines=row_lines(table.rows([name for name in read if name]), columns, max_line_bytes),
        total=table.num_rows if count else None,
        file=None,
        table=table,
        columns=tuple(kept_columns(table.names, wanted, columns)) if keep else (),
    )


@dataclass(frozen=True, slots=True)
class Pooled:
    """How rows of a table become requests to a model that pools; as in `RowColumns`."""

    task: str
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, model: ModelDescription, options: TableOptions, sampling: Mapping[str, Any]) -> Pooled | None:
        """None for a model that generates. sampling: the defaults of requests."""
        if not model.options.pools:
            return None
        task = options.task or ("score" if options.query_column else default_task(model.fields))
        cut = sampling.get("truncate_prompt_tokens")
        return cls(task, {} if cut is None else {"truncate_prompt_tokens": cut})


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [name for name in given.split(",") if name]


class TableOutput:
    """An output that cannot grow line by line: a table or a URL. Results go to a journal until all lines are done.

    journal: the file of result lines that the run writes and resumes.
    """

    def __init__(
        self, out: str, options: TableOptions, answers: AnswerColumns | None, task: str | None
    ) -> None:
        self.out = out
        self._task = task
        self._answers = answers
        name = out.rstrip("/").rpartition("/")[2] if is_url(out) else out
        self.journal = Path(options.journal or f"{name}.journal.jsonl")
        self._pictures = options.image_column is not None
        self._claims_to_be_whole = False

    @classmethod
    def wanted(
        cls, out: str, options: TableOptions, answers: AnswerColumns | None, task: str | None = None
    ) -> TableOutput | None:
        """A `TableOutput` if the output needs one; None if it can grow line by line. answers, task: as in
        `publish`."""
        return cls(out, options, answers, task) if is_url(out) or kind_of(out) in OUTPUTS else None

    def check(self, source: str, mode: Mode) -> None:
        """Raise OutputError if the output exists and must not be overwritten. Raises OSError."""
        if source == self.out or (
            (os.path.exists(source) and os.path.exists(self.out)) and os.path.samefile(source, self.out)
        ):
            raise OutputError(f"{source} is input and output; write the results to another file")
        if os.path.isdir(self.out):
            raise OutputError(f"{self.out} is a folder; name a file with -o")
        if mode is Mode.OVERWRITE or not exists(self.out):
            return
        if mode is Mode.NEW:
            raise OutputError(f"{self.out} already exists; use --overwrite to replace it")
        self._claims_to_be_whole = not self.journal.exists()

    def begin(self, source: Input, defaults: Mapping[str, Any]) -> Iterator[Line]:
        """Pass the input's lines through and digest them for the marker of the finished table. Raises ConfigError."""
        if self._answers is not None:
            self._answers.check_names((*source.columns, *result_columns(pictures=self._pictures)))
        lines = source.lines
        self._lines = DigestedLines(lines, defaults)
        return iter(self._lines)

    def is_whole(self, lines: Iterator[Line], shard: Shard | None) -> bool:
        """Whether an earlier run of this input finished the output. Reads the whole input.

        Raises OutputError if the output is not from a run of this input, and OSError.
        """
        if not self._claims_to_be_whole:
            return False
        remedy = "nothing was changed: name another output with -o, or replace it with --overwrite"
        if (found := Finished.of(self.out)) is None:
            raise OutputError(
                f"{self.out} cannot be resumed: there is no {self.journal.name}, and there is no record that a run "
                f"finished it; {remedy}"
            )
        for _ in lines:
            pass
        if (found.input, found.shard) != (self._lines.digest, _shard_text(shard)):
            raise OutputError(
                f"{self.out} was made from another input, with other sampling defaults or as another shard; {remedy}"
            )
        return True

    @property
    def has_rows(self) -> bool:
        """Whether results become rows; otherwise they are copied to a URL as lines."""
        return kind_of(self.out) in OUTPUTS

    def finish(
        self, source: Input, shard: Shard | None, receipts: ReceiptFile | None = None, *, failed: bool
    ) -> None:
        """Write the table and the end of its receipts, and delete the journal unless lines failed, because
        --retry-failed needs it then."""
        publish(
            self.journal,
            self.out,
            source.table,
            source.columns,
            pictures=self._pictures,
            answers=self._answers,
            task=self._task,
        )
        if receipts is not None:  # before the journal is deleted, so that a killed run can be resumed
            receipts.finish(digest_of(self.out, "sha256") if self.has_rows else None)
        if not failed:
            marker = Finished(table=digest_of(self.out), input=self._lines.digest, shard=_shard_text(shard))
            marker.write(self.journal, self.out)
            self.journal.unlink()
            state_path(self.journal).unlink(missing_ok=True)


def _shard_text(shard: Shard | None) -> str:
    return "" if shard is None else str(shard)


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open a file of requests for reading; `-` is standard input, and .gz files are decompressed."""
    if path == "-":
        yield sys.stdin.buffer
    elif is_packed(path):
        with gzip.open(path, "rb") as packed:
            yield cast("BinaryIO", packed)
    else:
        with open(path, "rb") as source:
            yield source


def check_first_line(
    lines: Iterator[Line], source: str, model: str | None, defaults: dict[str, Any]
) -> tuple[LineRequest | None, Iterator[Line]]:
    """Parse the first line. Returns its request, or None if it is invalid, and all lines.

    Raises NotStarted for no line, for a JSON file without one request a line, and for text if the model has no
    tokenizer.
    """
    if (line := next(lines, None)) is None:
        raise NotStarted(f"empty_file: {source} holds no request")
    lines = itertools.chain([line], lines)
    raw = b"" if line.raw is None else line.raw.strip()
    if raw == b"{" or (raw.startswith(b"[") and not _is_a_list_of_values(raw)):
        what = "a JSON array" if raw.startswith(b"[") else "JSON over several lines"
        raise NotStarted(
            f"invalid_json_line: {source} is {what}; write each request on one line (for an array: `jq -c '.[]' "
            f"{source}`), or read an array of rows with --prompt-column NAME"
        )
    request = parse_line(raw, line.number, defaults)
    if not isinstance(request, LineRequest):
        return None, lines
    if not isinstance(request.prompts[0], tuple):
        check_tokenizer(model, ", or write prompts as lists of token ids")
    return request, lines


def check_template(request: LineRequest | None, engine: EngineClient, model: str | None) -> None:
    """Raise NotStarted if the first request is a chat, and neither it nor the model has a chat template; or if it has
    pictures, which the engine does not read.

    If it is text and the model has a chat template, print how prompts can become chats (except for the embedded
    model, which completes code).
    """
    chat = None if request is None else request.prompts[0]
    if isinstance(chat, Chat) and "chat_template" not in chat.options and engine.chat_template is None:
        raise NotStarted(
            f"no_chat_template: {model or 'the embedded model'} has no chat template, and the first request is a "
            "chat; give one with --chat-template FILE, or write a prompt in place of messages"
        )
    if chat is not None and reads_pictures(chat) and engine.validator.pictures is None:
        raise NotStarted(f"no_pictures: the first request has pictures, and {engine.validator.no_pictures}")
    pools = request is not None and request.pooling is not None
    if isinstance(chat, str) and not pools and engine.chat_template is not None and model is not None:
        click.echo(
            "the model has a chat template, but prompts are completed as they are; use --chat to send each as a "
            "message",
            err=True,
        )


def _is_a_list_of_values(raw: bytes) -> bool:
    """Whether the line is a list of plain values: one bad line, not the beginning of an array of requests."""
    try:
        return not any(isinstance(each, dict) for each in json.loads(raw))
    except (ValueError, RecursionError):
        return False
