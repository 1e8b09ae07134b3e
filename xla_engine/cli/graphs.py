"""`xla-engine graphs`: list the compiled programs, of this machine or of a TPU that is not here."""

import contextlib
import json
import sys
from dataclasses import asdict
from typing import Any

import click

from xla_engine.cli import _common, _help
from xla_engine.utils.tables import aligned


@click.command(cls=_help.Sectioned, short_help="List the compiled programs, here or for a TPU.")
@click.option(
    "--topology",
    metavar="NAME",
    help="Compile for the chips of this TPU topology, on any machine: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, "
    "tpu7x:2x2x1. Needs the extra tpu.",
)
@click.option(
    "--program",
    "kinds",
    metavar="NAME",
    multiple=True,
    help="With --topology: compile only programs whose name begins like this, such as decode; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@_common.model_options
def graphs(topology: str | None, kinds: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """List every compiled program: name, shapes, seconds to lower and compile, scratch and reused memory.

    Nothing else runs on the device, and nothing is compiled after start-up. temp is the scratch memory of one call,
    alias the memory of its inputs that is updated in place.

    With --topology, no device is needed, and no weights: MODEL may be a config.json. Further columns are the
    arguments' memory, whether all fits into a chip's, the time of a call by the compiler's estimate (if no row needs
    what it can skip, and if rows need all of it), and what share of that the chip needs at its peak rates. Below are
    the most expensive source lines of each program.

    \b
    Exit status: 0 all programs compile and fit, 1 some do not, 2 the command could not start.

    \b
    Example:
      xla-engine graphs --model ./SmolLM2-135M --max-num-seqs 32
      xla-engine graphs --topology v5e:2x2 --tensor-parallel-size 4 --model ./Llama-3.1-8B/config.json
    """
    if topology is not None:
        _for_topology(topology, kinds, as_json, options)
        return
    if kinds:
        raise click.UsageError("--program is for --topology: an engine here compiles all of its programs.")
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_engine(options, show=not as_json))
        if as_json:
            _as_json(engine)
            return
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


def _as_json(engine: Any) -> None:
    programs = [asdict(report) for report in engine.inventory_report()]
    click.echo(json.dumps({"programs": programs, "cache_bytes": engine.runner.cache_bytes}))


def _for_topology(topology: str, kinds: tuple[str, ...], as_json: bool, options: dict[str, Any]) -> None:
    """Compile for a topology and print the report."""
    from xla_engine.config import EngineConfig
    from xla_engine.environment import embedded_model_directory, prepare_to_compile_ahead
    from xla_engine.utils.startup import startup_line

    with _common.startup_errors():
        config = EngineConfig(**_common.config_fields(options))
        prepare_to_compile_ahead()
        from xla_engine.engine.topology import compile_for, report_lines

        with startup_line(sys.stderr) as progress:
            model = options["model"] or embedded_model_directory()
            report = compile_for(topology, model, config, progress, kinds=kinds)
    click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report_lines(report)))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)
