"""Groups of options, and how help shows them."""

import copy
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from xla_engine.config import AUTO, EngineConfig
from xla_engine.config_options import Group, Option, option_of
from xla_engine.scheduler.user_policy import find_policy

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# Sections of help in order, and their options besides those of `EngineConfig`, which name their section themselves.
SECTIONS = {
    "Model": "model chat_template_path lora_modules",
    "Input and output": """
        output_path errors_path receipts_path sign_path resume retry_failed overwrite ordered created fingerprint
        max_line_bytes encoding no_progress""",
    "While it runs": "status_path metrics_path step_log_path verbose",
    "Tables": """
        prompt_column prompt_template image_column id_column sampling_columns keep_columns json_columns journal""",
    "More than one engine": "shard data_parallel_size num_hosts coordinator",
    "Defaults of requests": """
        max_tokens temperature seed truncate_prompt_tokens schema_path generation_config
        override_generation_config chat system""",
    "Slots and memory": "",
    "Pictures": "",
    "Scheduling": "start_timeout_s",
}


def together(*options: Decorator) -> Decorator:
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


def _numbers(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse numbers above 0 with commas between them."""
    return tuple(click.IntRange(1)(each.strip(), option, context) for each in value.split(","))


def json_value(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f'{error}; give a JSON object, such as {{"name": "value"}}') from error


_PARSERS: dict[str, Any] = {  # by what help calls the value
    "N|auto": _auto_or_number,
    "N,N": _numbers,
    "HOSTS": _hosts,
    "JSON": json_value,
}


def _type_of(about: Option) -> Any:
    """The type of an option's values on the command line; None leaves it to the default."""
    if about.metavar == "POLICY":
        return PolicyName()
    if about.metavar in _PARSERS:
        return str
    if about.least is not None:
        return click.IntRange(about.least)
    if about.is_number:
        low = about.low if about.above is None else about.above
        return click.FloatRange(low, about.high, min_open=about.above is not None)
    words = about.words or (about.choices if about.metavar is None else ())
    return click.Choice(words) if words else None


def choice_of(field: str) -> click.Choice[str]:
    """The words of a field of `EngineConfig`, for an option of a command that takes the same."""
    about = option_of(EngineConfig.__dataclass_fields__[field])
    return click.Choice(about.words or about.choices)


def engine_option(field: str, about: str = "") -> Decorator:
    """The option for a field of `EngineConfig`, as the field declares it. about: other help."""
    declared = EngineConfig.__dataclass_fields__[field]
    known = option_of(declared)
    more: dict[str, Any] = {}
    if known.metavar in _PARSERS:
        more["callback"] = _PARSERS[known.metavar]
    if isinstance(declared.default, tuple):
        more["default"] = ",".join(map(str, declared.default))
    if not known.no_flag:
        more["is_flag"] = True
    if known.metavar != "POLICY":
        more["metavar"] = known.metavar
    return field_option(
        EngineConfig, field, about or known.help, kind=_type_of(known), name=known.flag, **more
    )


def engine_options(*groups: Group) -> Decorator:
    """The options of all fields of `EngineConfig` in these groups, in the order of the fields."""
    fields = EngineConfig.__dataclass_fields__.values()
    chosen = [each for each in fields if option_of(each).help and option_of(each).group in groups]
    return together(*(engine_option(each.name) for each in chosen))


def field_option(
    record: Any, field: str, about: str, kind: Any = None, *, name: str = "", **more: Any
) -> Decorator:
    """The option for a field of a record, with the field's default.

    about: its help. kind: its type. name: by default the field's.
    """
    word, default = field.replace("_", "-"), record.__dataclass_fields__[field].default
    switch = isinstance(default, bool) and "is_flag" not in more
    shown = name or (f"--{word}/--no-{word}" if switch else f"--{word}")
    return click.option(shown, field, **{"type": kind, "default": default, "help": about, **more})


class Sectioned(click.Command):
    """A command whose help groups its options under the headings of `SECTIONS`. It knows other programs' names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click; the error for an option of llama.cpp or vLLM says what to write instead."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from xla_engine.cli._other_names import other_name  # a table that few commands need

            known = {
                name
                for parameter in self.get_params(ctx)
                for name in (*parameter.opts, *parameter.secondary_opts)
            }
            if (message := other_name(given, known)) is None:
                raise
            raise click.UsageError(message, ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading = {name: title for title, names in SECTIONS.items() for name in names.split()}
        for each in EngineConfig.__dataclass_fields__.values():
            if option_of(each).section:
                heading[each.name] = option_of(each).section
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


class PolicyName(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.2
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
