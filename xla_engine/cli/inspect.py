"""`xla-engine inspect`: describe a model and check whether it runs here, without loading it."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from xla_engine.cli import _common, _help


@click.command(cls=_help.Sectioned, short_help="Show what a model needs, and whether it runs here.")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@_common.engine_options
def inspect(model: str | None, as_json: bool, **options: Any) -> None:
    """Show what MODEL is and what it needs on this machine, without reading its weights.

    MODEL is a Hugging Face directory, a .gguf file or an id of the hub (whose files are then downloaded); without it,
    the small model that ships with the package. The table gives the memory that an engine needs for weights, slots and
    scratch, by max_model_len and max_num_seqs. Values in brackets exceed the available memory; the last
    column is the number of slots that fit.

    \b
    Exit status: 0 it runs, 1 something is not supported or does not fit, 2 no such model.

    \b
    Example:
      xla-engine inspect ./SmolLM2-135M
      xla-engine inspect ./Llama-3.1-8B --max-model-len 8192 --max-num-seqs 64 --json
    """
    with _common.startup_errors():
        from xla_engine.config import EngineConfig
        from xla_engine.engine.inspection import inspect_model, report_lines
        from xla_engine.environment import embedded_model_directory

        report = inspect_model(model or embedded_model_directory(), EngineConfig(**options))
    click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report_lines(report)))
    if not report.ok:
        sys.exit(_common.SOME_FAILED)
