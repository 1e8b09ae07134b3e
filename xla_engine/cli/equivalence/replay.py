"""`xla-engine replay`: run a record again, step by step."""

import contextlib
import sys

import click

from xla_engine.cli import _common, _records


@click.command(short_help="Run a record again, step for step.", context_settings={"show_default": True})
@click.argument("record_path", metavar="FILE")
@click.option("--model", metavar="DIR", help="Present path of the model.  [default: as recorded]")
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
        record, engine = _records.load_record(stack, record_path, model, force=force)
        from xla_engine.equivalence import replay as again

        report = again.replay(engine, record, force=force)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)
