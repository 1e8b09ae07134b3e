"""`xla-engine run --prompt`: stream one completion or answer."""

import sys
from typing import Any

import click

from xla_engine.cli import _common
from xla_engine.cli._answer import chat_prompt, note_temperature, show_answer
from xla_engine.cli._run.files import silence_stdout
from xla_engine.cli._run.first_line import check_tokenizer
from xla_engine.sampling_params import SamplingParams


def run_prompt(
    prompt: str, defaults: dict[str, Any], options: dict[str, Any], *, chat: bool | None, system: str | None
) -> None:
    """Write a prompt's completion or answer to standard output; exit with the command's status.

    defaults: sampling fields and `chat_template`. options: of the engine. chat: whether the prompt is a chat
    message; None means yes if there is a chat template. Notes go to standard error.
    """
    template = defaults.pop("chat_template", None)
    check_tokenizer(options["model"])
    if options["model"] is not None:
        note_temperature(defaults)
    with _common.startup_errors(), _common.load_engine(options, show=sys.stderr.isatty()) as engine:
        has_template = template is not None or engine.chat_template is not None
        if chat is None and has_template:
            click.echo("(sent as a chat message; --raw completes the text as it is)", err=True)
        request: dict[str, Any] = {"prompt": prompt}
        if chat or (chat is None and has_template):
            defaults = {"max_tokens": None, **defaults}
            request = chat_prompt(engine, chat_messages(prompt, system), template)
        try:
            output = show_answer(engine, lambda: engine.submit(params=SamplingParams(**defaults), **request))
        except BrokenPipeError:
            silence_stdout()
            return
        reason = output.outputs[0].finish_reason
        click.echo()
        if reason == "abort":
            raise SystemExit(_common.INTERRUPTED)
        if reason == "length":
            click.echo("(stopped at the token limit; use --max-tokens N for more)", err=True)
        elif reason != "stop":
            click.echo(output.error or f"the request ended with finish_reason {reason!r}", err=True)
            raise SystemExit(_common.SOME_FAILED)


def chat_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The conversation that `--chat` makes of a prompt."""
    said = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": prompt}]
