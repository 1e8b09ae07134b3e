"""LoRA options of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli._help import engine_option, together
from xla_engine.errors import ConfigError

if TYPE_CHECKING:
    from xla_engine.engine.client import EngineClient


def _adapters(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if len(pairs) < len(values) or not all(name and path for name, path in pairs.items()):
        raise click.BadParameter("give NAME=PATH, each name once")
    return pairs


# Adapters that requests select by name, and their limits.
lora_options = together(
    engine_option("enable_lora", "Let each request use its own LoRA adapter.", is_flag=True),
    click.option(
        "--lora-modules",
        metavar="NAME=PATH",
        multiple=True,
        callback=_adapters,
        help="A LoRA adapter in PEFT's format, for requests whose model is NAME; repeatable. Needs --enable-lora.",
    ),
    engine_option(
        "max_loras",
        "Maximum number of adapters in memory; at least those of --lora-modules.",
        click.IntRange(1),
    ),
    engine_option("max_lora_rank", "Highest rank of an adapter.", click.IntRange(1)),
)


def with_room(fields: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add LoRA limits to fields of `EngineConfig` so that the adapters in the options fit."""
    if adapters := options.get("lora_modules"):
        if not fields["enable_lora"]:
            raise ConfigError("--lora-modules needs --enable-lora")
        fields["max_loras"] = max(fields["max_loras"], len(adapters))
    return fields


def load(engine: EngineClient, options: Mapping[str, Any]) -> None:
    """Load the adapters in the options and pin them."""
    from xla_engine.model_loader.peft.request import LoRARequest

    for number, (name, path) in enumerate(options.get("lora_modules", {}).items(), 1):
        engine.add_lora(LoRARequest(name, number, path))
        engine.pin_lora(number)
