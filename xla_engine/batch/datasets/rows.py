"""Turn the rows of a table into request lines."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.batch.datasets.pooled import pooled_record
from xla_engine.batch.encodings import MAX_LINE_BYTES
from xla_engine.batch.lines import Line
from xla_engine.errors import ConfigError
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.json_line import dump_line, kind
from xla_engine.utils.plain import integer_of, is_missing

Row = Mapping[str, Any] | str  # a row by column, or why it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """The columns that form a request.

    prompt: holds text, token ids, or the messages of a chat. template: text with {column} in it, used instead of
    `prompt`; {{ is a literal brace. id: becomes the custom_id, as text. sampling: sampling fields; nulls are ignored.
    task: of a model that pools, "embed", "classify" or "score"; None for a model that generates. query: of "score",
    the first text of a pair. defaults: fields of a request to such a model for rows without them.
    image: holds a picture or a list of pictures: bytes of a file, a path, an address, or {"bytes", "path"}.

    A column `sampling_params` (an object, or JSON text of one) holds further fields of the row's request.
    """

    prompt: str | None = None
    template: str | None = None
    id: str | None = None
    sampling: tuple[str, ...] = ()
    image: str | None = None
    task: str | None = None
    query: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def of(self, names: Sequence[str]) -> RowColumns:
        """Resolve the columns against the column `names` of a table.

        The prompt defaults to `messages` or `prompt`, the id to `custom_id`. Raises ConfigError for a missing column.
        """
        if self.prompt is not None and self.template is not None:
            raise ConfigError("--prompt-column and --prompt-template exclude each other; give one")
        if (self.task == "score") != (self.query is not None):
            raise ConfigError(
                "scores are of a query and a text: give --query-column NAME, with a model that has a classifier"
            )
        if self.task is not None and self.image is not None:
            raise ConfigError("a model that pools reads no pictures: leave out --image-column")
        for name in (
            self.prompt,
            self.id,
            self.image,
            self.query,
            *self.sampling,
            *template_columns(self.template),
        ):
            if name is not None and name not in names:
                hint = did_you_mean(name, names) or f"; it has {', '.join(names)}"
                raise ConfigError(f"the input has no column {name!r}{hint}")
        prompt = self.prompt
        if prompt is None and self.template is None:
            prompt = next((name for name in ("messages", "prompt") if name in names), None)
            if prompt is None:
                raise ConfigError(
                    f"no column is called prompt or messages; name one of {', '.join(names)} with --prompt-column, "
                    f"or give "
                    "--prompt-template"
                )
        given_id = self.id or ("custom_id" if "custom_id" in names else None)
        return replace(self, prompt=prompt, id=given_id)


def template_columns(template: str | None) -> list[str]:
    """The columns that a template names. Raises ConfigError for an invalid template."""
    try:
        parts = [] if template is None else list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"--prompt-template {template!r}: {error}; write {{column}}, and {{{{ for a brace"
        ) from error
    for _, name, form, conversion in parts:
        if name is not None and (not name or form or conversion):
            raise ConfigError(
                f"--prompt-template {template!r}: write only the name of a column in braces, {{column}}"
            )
    return [name for _, name, _, _ in parts if name is not None]


def row_lines(
    rows: Iterable[Row], columns: RowColumns, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Line]:
    """Yield one line for each row, numbered from 1. An invalid row has its error in `problem`."""
    for number, row in enumerate(rows, 1):
        record, problem = ({}, row) if isinstance(row, str) else row_record(row, columns)
        images = None
        if columns.image is not None and not isinstance(row, str):
            if images := row_images(row.get(columns.image)):
                record["images"] = list(map(_digest, images))
            else:
                problem = problem or f"column {columns.image!r} has no picture in this row"
        try:
            raw = dump_line(record).removesuffix(b"\n")
        except (TypeError, ValueError) as error:
            kept = {name: value for name, value in record.items() if name == "custom_id"}
            raw, problem = dump_line(kept).removesuffix(b"\n"), f"a value of the row is not JSON: {error}"
        if len(raw) > max_line_bytes:
            yield Line(number, len(raw), None)
        else:
            yield Line(number, len(raw), raw, problem, images)


def row_record(row: Mapping[str, Any], columns: RowColumns) -> tuple[dict[str, Any], str | None]:
    """The fields of a row's request line, and what is wrong with the row, if anything."""
    record: dict[str, Any] = {}
    problem = None
    if columns.id is not None:
        value = row.get(columns.id)
        value = value if (number := integer_of(value)) is None else number
        if value is None or isinstance(value, bool | float | bytes | list | dict) or value == "":
            problem = f"column {columns.id!r} has no id for this row: it must be text or an integer"
        else:
            record["custom_id"] = str(value)
    if columns.template is not None:
        names = template_columns(columns.template)
        empty = next((name for name in names if is_missing(row.get(name))), None)
        if empty is not None:
            return record, problem or f"column {empty!r} is empty in this row, and the template needs it"
        record["prompt"] = columns.template.format_map({name: row[name] for name in names})
    else:
        assert columns.prompt is not None
        value = row.get(columns.prompt)
        if is_missing(value):
            return record, problem or f"column {columns.prompt!r} is empty in this row"
        is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
        record["messages" if is_chat else "prompt"] = without_nulls(value) if is_chat else value
    more = row.get("sampling_params")
    if isinstance(more, str):
        try:
            more = json.loads(more)
        except ValueError as error:
            return record, problem or f"column 'sampling_params' is not JSON: {error}"
    if more is not None and not isinstance(more, Mapping):
        return record, problem or f"column 'sampling_params' must be an object, not {kind(more)}"
    given = without_nulls({name: _field(row.get(name)) for name in columns.sampling} | dict(more or {}))
    if twice := sorted(given.keys() & {"custom_id", "id", "prompt", "messages"}):
        return record, problem or f"column 'sampling_params' has {twice[0]!r}, which is not a sampling field"
    record |= given
    if columns.task is None or problem is not None:
        return record, problem
    query = None if columns.query is None else row.get(columns.query)
    if columns.query is not None and is_missing(query):
        return record, f"column {columns.query!r} is empty in this row"
    return pooled_record(record, columns.task, query, columns.defaults)


def row_images(value: Any) -> tuple[object, ...]:
    """The pictures in a value of a table."""
    many = value if isinstance(value, list) else [value]
    return tuple(without_nulls(each) for each in many if not is_missing(each) and each != "")


def _digest(image: object) -> str:
    """Stands for a picture in the line of a row, which is JSON, and of which a resumed run compares the bytes."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    return hashlib.sha256(image).hexdigest() if isinstance(image, bytes) else str(image)


def _field(value: Any) -> Any:
    """The value of a sampling field. CSV has only text, so text is read as JSON, and empty text as no value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError:
        return value


def without_nulls(value: Any) -> Any:
    """Drop fields that are null or NaN from objects in a table's value: a table has every field in every row."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if not is_missing(each)}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
