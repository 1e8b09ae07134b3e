"""Options of `xla-engine run` for tables."""

from __future__ import annotations

from dataclasses import dataclass

import click

from xla_engine.cli._help import together


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The table's columns for prompt and id, the columns that the output keeps, and the path of the journal."""

    prompt_column: str | None = None
    prompt_template: str | None = None
    image_column: str | None = None
    id_column: str | None = None
    sampling_columns: str | None = None
    keep_columns: str | None = None
    json_columns: bool = False
    query_column: str | None = None
    task: str | None = None
    journal: str | None = None

    @property
    def asks_for_columns(self) -> bool:
        columns = (self.prompt_column, self.prompt_template, self.image_column, self.id_column)
        return any((*columns, self.query_column, self.task))


# Options that become `TableOptions`.
table_options = together(
    click.option(
        "--prompt-column", metavar="NAME", help="The column of a table that holds prompts or chats."
    ),
    click.option(
        "--prompt-template", metavar="TEXT", help="The prompt of each row: text with {column} in it."
    ),
    click.option(
        "--image-column",
        metavar="NAME",
        help="The column of a table that holds pictures: bytes, paths or lists of them.",
    ),
    click.option(
        "--task",
        type=click.Choice(["embed", "classify", "score"]),
        help="What a model that pools computes of each row of a table.  [default: score with --query-column, else "
        "classify if the model has a classifier, else embed]",
    ),
    click.option(
        "--query-column",
        metavar="NAME",
        help="The column of a table that holds the queries for which a cross-encoder scores the prompts.",
    ),
    click.option("--id-column", metavar="NAME", help="The column of a table that holds ids."),
    click.option(
        "--sampling-columns",
        metavar="NAME,...",
        help="Columns of a table to use as sampling fields, such as max_tokens,seed.",
    ),
    click.option(
        "--keep-columns", metavar="NAME,...", help="Input columns to copy to an OUTPUT table.  [default: all]"
    ),
    click.option(
        "--json-columns",
        is_flag=True,
        help="Add a column to an OUTPUT table for each property of --json-schema.",
    ),
    click.option(
        "--journal",
        metavar="FILE",
        help="Where results are kept until an OUTPUT table or URL is written.  [default: OUTPUT.journal.jsonl]",
    ),
)
