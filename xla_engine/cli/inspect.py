"""`xla-engine inspect`: describe a model and check whether it runs here, without loading it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common, _help

if TYPE_CHECKING:
    from xla_engine.batch.earlier_runs import LastRun


@click.command(
    cls=_help.Sectioned,
    short_help="Show what a model needs, and whether it runs here.",
    context_settings={"show_default": False},
)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@_common.slot_options
def inspect(model: str | None, as_json: bool, **options: Any) -> None:
    """Show what MODEL is and what it needs on this machine, without reading its weights.

    MODEL is a Hugging Face directory, a config.json, a .gguf file or an id of the hub (whose files are then
    downloaded); without it, the small model that ships with the package. The table gives the memory that an engine
    needs for weights, slots and scratch, by max_model_len and max_num_seqs. Values in brackets exceed the available
    memory; the last column is the number of slots that fit. After a run of the model on this machine, the last line
    says how long a thousand more answers would take.

    \b
    Exit status: 0 it runs, 1 something is not supported or does not fit, 2 no such model.

    \b
    Example:
      xla-engine inspect ./SmolLM2-135M
      xla-engine inspect ./Llama-3.1-8B --max-model-len 8192 --max-num-seqs 64 --json
    """
    _common.pause_collections()
    with _common.startup_errors():
        from xla_engine.batch.earlier_runs import LastRun
        from xla_engine.config import EngineConfig
        from xla_engine.environment import embedded_model_directory
        from xla_engine.model_loader.config_only import open_named

        named = model or embedded_model_directory()
        files, config = open_named(named), EngineConfig(**options)
        from xla_engine.engine.inspection_report import report_lines
        from xla_engine.engine.kept_inspections import inspect_or_recall

        report, last = inspect_or_recall(files, config), LastRun.of(named)
    if as_json:
        told = None if last is None else {**asdict(last), "tokens_per_s": last.tokens_per_s}
        click.echo(json.dumps(report.to_json() | {"last_run": told}))
    else:
        click.echo("\n".join((*report_lines(report), *_time(last))))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)


def _time(last: LastRun | None) -> tuple[str, ...]:
    """What the last run lets expect; nothing without one."""
    if last is None:
        return ()
    answers = f"1,000 answers of {last.mean_tokens:.0f} tokens, as the last run's were"
    return ("", f"{answers}: {last.time_of(1000 * last.mean_tokens)}")
