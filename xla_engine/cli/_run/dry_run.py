"""`xla-engine run --dry-run`: check every line without running it."""

import itertools
import sys
from typing import Any

import click

from xla_engine.batch.requests import LineError
from xla_engine.cli import _common
from xla_engine.cli._run.first_line import check_first_line
from xla_engine.cli._run.tables import TableOptions, open_lines


def dry_run(
    source: str, tables: TableOptions, defaults: dict[str, Any], max_line_bytes: int, options: dict[str, Any]
) -> None:
    """Print errors with line numbers and an estimate of tokens; exit with the command's status."""
    with _common.startup_errors():
        from xla_engine.batch.dry_run import DryRun
        from xla_engine.config import EngineConfig
        from xla_engine.environment import embedded_model_directory

        fields = _common.config_fields(options)
        checks = DryRun(options["model"] or embedded_model_directory(), EngineConfig(**fields))
        with open_lines(source, tables, max_line_bytes) as opened:
            lines = opened.lines
            if (first := next(lines, None)) is None:
                raise _common.NotStarted(f"empty_file: {source} holds no request")
            check_first_line(first, source, options["model"], defaults)
            report = checks.run(itertools.chain([first], lines), defaults=defaults, on_error=_print)
    for text in report.lines():
        click.echo(text)
    if report.failed:
        sys.exit(_common.SOME_FAILED)


def _print(error: LineError) -> None:
    click.echo(f"line {error.line}: {error.code}: {error.message}")
