"""Groups of options, and how help shows them."""

import copy
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from xla_engine.config import AUTO, STORED_AS, EngineConfig
from xla_engine.scheduler.user_policy import find_policy

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

DTYPE = click.Choice(["auto", "bfloat16", "float32"])
QUANTIZATION = click.Choice(["int8", "packed", "packed-int8", "gguf", "gguf-int8", *STORED_AS])
SECTIONS = {  # sections of help: titles, and the options in each
    "Model": """
        model dtype quantization bits chat_template_path tensor_parallel_size attention_backend isa
        enable_lora lora_modules max_loras max_lora_rank runner pooler_config hf_overrides""",
    "Input and output": """
        output_path errors_path resume retry_failed overwrite ordered created fingerprint max_line_bytes
        no_progress""",
    "While it runs": "status_path metrics_path step_log_path phase_timers verbose",
    "Tables": "prompt_column prompt_template image_column id_column sampling_columns keep_columns journal",
    "More than one engine": "shard data_parallel_size",
    "Defaults of requests": """
        max_tokens temperature seed generation_config override_generation_config chat system""",
    "Slots and memory": """
        max_num_seqs max_model_len memory_utilization num_blocks kv_cache_memory_bytes kv_cache_dtype
        swap_space enable_prefix_caching mamba_cache_mode mamba_block_size mamba_cache_states
        prefix_cache_dir prefix_cache_bytes keep_finished""",
    "Pictures": "image_cache_bytes allowed_local_media_path allowed_media_domains mm_processor_kwargs",
    "Scheduling": """
        scheduling_policy quantum priority_aging preemption max_num_batched_tokens lag speculative_config
        shadow_rate step_timeout_s start_timeout_s""",
}


def together(*options: Option) -> Option:
    """Combine options into one decorator, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _auto_or_number(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """Parse a number above 0, or "auto"."""
    return value if value in (None, AUTO) else click.IntRange(1)(value, option, context)


def _hosts(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    """Split host names at commas."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def json_value(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f'{error}; give a JSON object, such as {{"name": "value"}}') from error


_PARSERS = {"N|auto": _auto_or_number, "HOSTS": _hosts, "JSON": json_value}  # by what help calls the value


def engine_option(field: str, about: str, metavar: str | None = None, **more: Any) -> Option:
    """`field_option` for a field of `EngineConfig`, with the type of its limits.

    metavar: what help calls the value, in place of the choices or the least number.
    """
    limits = EngineConfig.__dataclass_fields__[field].metadata
    kind: Any = None
    if metavar in _PARSERS:
        kind, more = str, {"callback": _PARSERS[metavar], **more}
    elif "least" in limits:
        kind = click.IntRange(limits["least"])
    elif "choices" in limits and metavar is None:
        kind = click.Choice(limits["choices"])
    return field_option(EngineConfig, field, about, **{"kind": kind, "metavar": metavar, **more})


def field_option(
    record: Any, field: str, about: str, kind: Any = None, *, name: str = "", **more: Any
) -> Option:
    """The option for a field of a record, with the field's default.

    about: its help. kind: its type. name: by default the field's.
    """
    word, default = field.replace("_", "-"), record.__dataclass_fields__[field].default
    switch = isinstance(default, bool) and "is_flag" not in more
    shown = name or (f"--{word}/--no-{word}" if switch else f"--{word}")
    return click.option(shown, field, **{"type": kind, "default": default, "help": about, **more})


class Sectioned(click.Command):
    """A command whose help groups its options under the headings of `SECTIONS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading = {name: title for title, names in SECTIONS.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SECTIONS)}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                rows[heading.get(parameter.name or "", "Options")].append(row)
        for title, some in rows.items():
            if some:
                with formatter.section(title):
                    formatter.write_dl(some)


class RenamedOption(click.Option):
    """An option of which help shows only the first name; the others are former names."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy.copy(self)
        shown.opts, shown.secondary_opts = self.opts[:1], self.secondary_opts[:1]
        return super(RenamedOption, shown).get_help_record(ctx)


class Policy(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.2
    """A scheduling policy: its name, or an import path, which may begin in the working directory."""

    name = "policy"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME|PACKAGE.MODULE:NAME"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ":" in value and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            find_policy(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value
