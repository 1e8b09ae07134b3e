"""Options of commands that can run a pooling model."""

from xla_engine.cli._common import json_value
from xla_engine.cli._help import engine_option, together

# Fields of `EngineConfig` for pooling.
pooling_options = together(
    engine_option("runner", "Generate text, or one vector per prompt; auto follows the checkpoint."),
    engine_option(
        "pooler_config",
        'Override how the checkpoint pools: \'{"pooling_type": "MEAN"}\'.',
        metavar="JSON",
        callback=json_value,
    ),
    engine_option(
        "hf_overrides",
        "Override fields of config.json of a pooling model.",
        metavar="JSON",
        callback=json_value,
    ),
)
