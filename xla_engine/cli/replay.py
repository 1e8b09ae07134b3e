"""`xla-engine replay`: run a record again, step by step."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from xla_engine.cli import _common

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.equivalence.record import Record


@click.command(short_help="Run a record again, step for step.")
@click.argument("record_path", metavar="FILE")
@click.option("--model", metavar="DIR", help="Where the model is now.  [default: as recorded]")
@click.option("--force", is_flag=True, help="Replay even on another model, version or device.")
def replay(record_path: str, model: str | None, force: bool) -> None:
    """Run a record of `xla-engine verify --record` again and stop at the first difference.

    Every plan and every token and log-probability of each step must be as recorded. The engine gets the recorded
    options; a record of another model, option, jax version or device is refused.

    \b
    Exit status: 0 the same, 1 a difference, 2 refused or could not start.

    \b
    Example:
      xla-engine verify --record last.json
      xla-engine replay last.json
    """
    with contextlib.ExitStack() as stack, _common.startup_errors():
        record, engine = load_record(stack, record_path, model, force=force)
        from xla_engine.equivalence import replay as again

        report = again.replay(engine, record, force=force)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)


def load_record(
    stack: contextlib.ExitStack, path: str, model: str | None, *, force: bool
) -> tuple[Record, XlaBatchEngine]:
    """Load a record, and an engine with its options and its model, or `model`."""
    open(path, "rb").close()  # report a missing file before jax is imported
    from dataclasses import asdict

    from xla_engine.equivalence.record import read_record
    from xla_engine.equivalence.replay import engine_config

    record = read_record(path)
    config = asdict(engine_config(record, force=force))
    options = {"model": record.model_path if model is None else model, **config}
    return record, stack.enter_context(_common.load_one_engine(options, show=True))
