"""The options of commands that may run a model that pools."""

from __future__ import annotations

import click

from xla_engine.cli._common import json_value
from xla_engine.cli._help import together

# Fields of `EngineConfig` about vectors, scores and classes.
pooling_options = together(
    click.option(
        "--runner",
        type=click.Choice(["auto", "generate", "pooling"]),
        default="auto",
        help="Make text, or one vector of each prompt; auto is what the checkpoint is for.",
    ),
    click.option(
        "--pooler-config",
        metavar="JSON",
        callback=json_value,
        help='How vectors are made, in place of what the checkpoint says: \'{"pooling_type": "MEAN"}\'.',
    ),
    click.option(
        "--hf-overrides",
        metavar="JSON",
        callback=json_value,
        help="Fields of config.json, of a model that makes vectors or scores, in place of the file's.",
    ),
)
