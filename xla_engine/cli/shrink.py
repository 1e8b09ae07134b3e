"""`xla-engine shrink`: reduce a failing record."""

import contextlib
import sys

import click

from xla_engine.cli import _common
from xla_engine.cli.replay import load_record
from xla_engine.utils.progress import counting


@click.command(short_help="Reduce a failing record to a small one.")
@click.argument("record_path", metavar="FILE")
@click.option("-o", "--output", "output_path", metavar="SMALLER", required=True, help="The small record.")
@click.option("--model", metavar="DIR", help="Where the model is now.  [default: as recorded]")
@click.option("--max-runs", type=click.IntRange(1), default=1000, help="Maximum number of batched runs.")
@click.option("--force", is_flag=True, help="Shrink even on another model, version or device.")
def shrink(record_path: str, output_path: str, model: str | None, max_runs: int, force: bool) -> None:
    """Reduce a record in which a request differs from its run alone to a small one that still differs.

    Requests, aborts and turns are removed, prompts and outputs shortened, and sampling simplified, as long
    as a request still differs between alone and batched. The small schedule is printed turn by turn.

    \b
    Exit status: 0 a failing record was written, 1 nothing differs here, 2 refused or could not start.

    \b
    Example:
      xla-engine verify --record failing.json
      xla-engine shrink failing.json -o small.json
    """
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            record, engine = load_record(stack, record_path, model, force=force)
            from xla_engine.equivalence import shrink as smaller
            from xla_engine.equivalence.record import write_record
            from xla_engine.equivalence.replay import check_identity

            if not force:
                check_identity(engine, record)
        count = stack.enter_context(counting("runs", sys.stderr))
        with _common.startup_errors():
            report = smaller.shrink(engine, record.schedule, max_runs=max_runs, progress=count)
            if report.record is not None:
                write_record(output_path, report.record)
    click.echo("\n".join(report.lines()))
    if report.record is None:
        sys.exit(_common.SOME_FAILED)
