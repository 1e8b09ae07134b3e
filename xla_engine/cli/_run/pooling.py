"""Options of commands that can run a pooling model."""

import click

from xla_engine.cli._common import json_value
from xla_engine.cli._help import together

# Fields of `EngineConfig` for pooling.
pooling_options = together(
    click.option(
        "--runner",
        type=click.Choice(["auto", "generate", "pooling"]),
        default="auto",
        help="Generate text, or one vector per prompt; auto follows the checkpoint.",
    ),
    click.option(
        "--pooler-config",
        metavar="JSON",
        callback=json_value,
        help='Override how the checkpoint pools: \'{"pooling_type": "MEAN"}\'.',
    ),
    click.option(
        "--hf-overrides",
        metavar="JSON",
        callback=json_value,
        help="Override fields of config.json of a pooling model.",
    ),
)
