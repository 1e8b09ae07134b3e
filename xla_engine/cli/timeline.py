"""`xla-engine timeline`: a record as a picture."""

from __future__ import annotations

import click

from xla_engine.cli import _common


@click.command(short_help="Draw a record: slots by steps.")
@click.argument("record_path", metavar="RECORD")
@click.option(
    "-o", "--output", "output_path", metavar="FILE", required=True, help=".html, .json, .png, .svg or .pdf."
)
def timeline(record_path: str, output_path: str) -> None:
    """Draw who held which slot in which step, and what it did there: prefill, decode, wait.

    RECORD is a file of `run --record`, `verify --record` or `simulate --record`. A .html page zooms, pans and tells
    about what is under the pointer, without a network; .json is a trace for chrome://tracing or ui.perfetto.dev, with
    the record's times; pictures need the extra `plot`.

    \b
    Example:
      xla-engine run examples/requests.jsonl -o out.jsonl --record steps.jsonl
      xla-engine timeline steps.jsonl -o steps.html
    """
    from xla_engine.timeline import read_timeline, write_timeline

    with _common.starting():
        found = read_timeline(record_path)
        write_timeline(found, output_path)
    click.echo(f"{found.steps} steps of {found.slots} slots, {len(found.requests)} requests: {output_path}")
