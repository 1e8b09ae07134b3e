"""`xla-engine timeline`: draw a run."""

import click

from xla_engine.cli import _common


@click.command(short_help="Draw a run: slots by steps.")
@click.argument("path", metavar="FILE")
@click.option(
    "-o", "--output", "output_path", metavar="FILE", required=True, help=".html, .json, .png, .svg or .pdf."
)
def timeline(path: str, output_path: str) -> None:
    """Draw which request held which slot in which step, and what it did there: prefill, decode, wait.

    FILE is a step log (`run --step-log`, `simulate --step-log`) or a record (`verify --record`), which has no times. A
     .html page zooms, pans and explains what is under the pointer, without a network; .json is a trace for
    chrome://tracing or ui.perfetto.dev; pictures need the extra `plot`.

    \b
    Example:
      xla-engine run examples/requests.jsonl -o out.jsonl --step-log steps.jsonl
      xla-engine timeline steps.jsonl -o steps.html
    """
    from xla_engine.tools.timeline import read_timeline, write_timeline

    with _common.startup_errors():
        found = read_timeline(path)
        write_timeline(found, output_path)
    click.echo(f"{found.steps} steps of {found.slots} slots, {len(found.requests)} requests: {output_path}")
