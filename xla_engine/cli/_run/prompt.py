"""`xla-engine run --prompt`: one completion, shown as it comes."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from xla_engine.cli import _common
from xla_engine.cli._run.files import silence_stdout
from xla_engine.sampling_params import SamplingParams


def run_prompt(prompt: str, defaults: dict[str, Any], options: dict[str, Any]) -> None:
    """Write the completion of a prompt to standard output; exit with the command's status.

    defaults: sampling fields. options: of the engine. A note about a text that was cut by its length goes to standard
    error.
    """
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            engine = stack.enter_context(_common.load_engine(options, show=sys.stderr.isatty()))
            engine.submit(prompt, SamplingParams.from_mapping(defaults))
        shown, reason = "", None
        try:
            while reason is None:
                for output in engine.step():
                    completion = output.outputs[0]
                    click.echo(completion.text[len(shown) :], nl=False)
                    shown, reason = completion.text, completion.finish_reason
        except BrokenPipeError:
            silence_stdout()
            return
        except KeyboardInterrupt:
            click.echo()
            raise SystemExit(_common.INTERRUPTED) from None
        click.echo()
        if reason == "length":
            click.echo("(cut by its length; --max-tokens N gives more)", err=True)
        elif reason != "stop":
            click.echo(output.error or f"the request ended with finish_reason {reason!r}", err=True)
            raise SystemExit(_common.SOME_FAILED)
