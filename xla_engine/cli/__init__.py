"""The command line: `xla-engine COMMAND`.

Each module without a leading underscore defines the command of its name. It is imported only when its command is used,
and imports jax and the engine inside functions, so that help and usage errors appear at once.
"""

import pkgutil
import sys
from importlib import import_module
from typing import Any

import click

from xla_engine import __version__
from xla_engine.cli._common import INTERRUPTED
from xla_engine.utils.did_you_mean import did_you_mean


class _Commands(click.Group):
    """A group that loads commands from modules: `some_name.py` defines the click command `some_name`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (each.name for each in pkgutil.iter_modules(__path__) if not each.name.startswith("_"))
        return sorted(name.replace("_", "-") for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"{__name__}.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click; the error for an unknown command names a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not (similar := did_you_mean(args[0], self.list_commands(ctx))):
                raise
            raise click.UsageError(error.message.rstrip(".") + similar, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C ends it with exit status 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="xla-engine")
def main() -> None:
    """Batch engine for language models on JAX/XLA: the same bits, whatever the batch.

    \b
    xla-engine run examples/requests.jsonl -o out.jsonl

    Without --model, commands use the small model that ships with the package; it writes Python. For the options of
    a command: xla-engine COMMAND --help.
    """
