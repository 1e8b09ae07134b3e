"""`xla-engine sweep`: measure decode speed by number of slots."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from xla_engine.cli import _common, _help


def _widths(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    return sorted({click.IntRange(1)(part, option, context) for part in value.split(",")})


@click.command(cls=_help.Sectioned, short_help="Measure speed against the number of slots.")
@_common.model_option
@_common.device_options
@click.option("--widths", default="1,2,4,8,16,32,64", callback=_widths, help="Numbers of slots to measure.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, help="Prompt tokens of each request.")
@click.option("--new-tokens", type=click.IntRange(2), default=64, help="New tokens of each request.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Measured runs at each width.")
@click.option("--plot", "plot_path", metavar="FILE", help="Draw the results (extra `plot`).")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures.")
def sweep(
    widths: list[int],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    plot_path: str | None,
    json_path: str | None,
    **options: Any,
) -> None:
    """Measure decode speed at several numbers of slots (widths), and report from which width more slots gain nothing.

    Each width is measured with its own engine, which decodes as many requests as it has slots. A cliff is a
    width at which tokens per second fall, or at which a step takes much longer than its rows explain. A
    width that needs more memory than the device has is reported with the arithmetic.

    \b
    Example:
      xla-engine sweep --widths 8,16,32,64 --plot sweep.png
    """
    with _common.startup_errors():
        from xla_engine.config import EngineConfig

        config = EngineConfig(**_common.config_fields(options))
        _common.check_model(options, config)
        from xla_engine.engine.batch_engine import XlaBatchEngine
        from xla_engine.tools.bench import sweep as measure

        made = measure.sweep(
            partial(XlaBatchEngine.from_pretrained, options["files"]),
            config,
            widths,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
        )
        points = []
        for point in made:
            points.append(point)
            click.echo(f"{point.slots} slots done", err=True)
        click.echo("\n".join([*measure.table(points), "", *measure.warnings(points)]))
        if plot_path is not None:
            measure.plot(points, plot_path, f"{prompt_tokens} tokens in, {new_tokens} out")
        if json_path is not None:
            Path(json_path).write_text(json.dumps([point.record() for point in points], indent=1) + "\n")
    if not any(point.refusal is None for point in points):
        sys.exit(_common.NOT_STARTED)
