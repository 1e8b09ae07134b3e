"""`xla-engine graphs`: list the compiled programs."""

import contextlib
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.utils.tables import aligned


@click.command(cls=_help.Sectioned, short_help="List the compiled programs.")
@_common.model_options
def graphs(**options: Any) -> None:
    """List every compiled program: name, shapes, seconds to lower and compile, scratch and reused memory.

    Nothing else runs on the device, and nothing is compiled after start-up. temp is the scratch memory of one call,
    alias the memory of its inputs that is updated in place.

    \b
    Example:
      xla-engine graphs --model ./SmolLM2-135M --max-num-seqs 32
    """
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_engine(options, show=True))
        rows = [("program", "lower s", "compile s", "temp MiB", "alias MiB", "shapes")]
        for report in engine.inventory_report():
            seconds = (f"{report.lower_seconds:.2f}", f"{report.compile_seconds:.2f}")
            sizes = (f"{report.temp_bytes / 2**20:.2f}", f"{report.alias_bytes / 2**20:.2f}")
            rows.append((report.name, *seconds, *sizes, report.shapes))
        stats = engine.stats()
    click.echo("\n".join(aligned(rows, right=range(1, 5))))
    click.echo(
        f"{len(rows) - 1} programs; load {stats.load_seconds:.2f} s, compile {stats.compile_seconds:.2f} s"
    )
