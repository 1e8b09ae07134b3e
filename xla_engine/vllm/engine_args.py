"""vLLM's `EngineArgs`: the options of an engine, also from a command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.vllm_options import VLLM_OPTIONS

_DEFAULTS: dict[str, Any] = {
    **{name: (option.accepted or (None,))[0] for name, option in VLLM_OPTIONS.items()},
    **{each.name: each.default for each in fields(EngineConfig)},
    "data_parallel_size": 1,
}


class EngineArgs:
    """A model and the options of `xla_engine.LLM`, from which an engine can be created."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.model = model
        self.options = options

    def __getattr__(self, name: str) -> Any:
        """An option's value; the default if it was not given."""
        if name in self.__dict__.get("options", ()):
            return self.options[name]
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise AttributeError(name)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option; flags that are not given stay unset."""
        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=argparse.SUPPRESS, help="directory, .gguf file or hub id")
        for name in sorted(_DEFAULTS):
            flag = "--" + name.replace("_", "-")
            group.add_argument(
                flag,
                dest=name,
                type=_value,
                nargs="?",
                const=True,
                default=argparse.SUPPRESS,
                metavar="VALUE",
            )
            group.add_argument(
                flag.replace("--", "--no-", 1), dest=name, action="store_const", const=False,
                default=argparse.SUPPRESS, help=argparse.SUPPRESS,
            )  # fmt: skip
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options that were given; other attributes of `args` are ignored."""
        given = {name: value for name, value in vars(args).items() if name in _DEFAULTS}
        return cls(getattr(args, "model", None), **given)


class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts `--max_tokens` for `--max-tokens`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_dashed(word) for word in given], namespace)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, sign, value = word.partition("=")
    return flag.replace("_", "-") + sign + value


def _value(text: str) -> Any:
    """Parse a number, true, false or other JSON; any other text is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
