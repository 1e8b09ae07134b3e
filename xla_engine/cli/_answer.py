"""Stream one answer of an engine to standard output: for `xla-engine chat`, and for `xla-engine run --prompt`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xla_engine.open_engine import EngineClient


def show_answer(engine: EngineClient, submit: Callable[[], str]) -> RequestOutput:
    """Write the text of the request that `submit` queues, and return its final output. Main thread only.

    Ctrl-C aborts the request between two steps; its finish reason is then "abort". Raises what `submit` raises.
    """
    asked: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        request_id, shown = submit(), ""
        while True:
            for output in engine.step():
                text = output.outputs[0].text
                click.echo(text[len(shown) :], nl=False)
                shown = text
                if output.finished:
                    return output
            if asked:
                engine.abort(request_id)
    finally:
        signal.signal(signal.SIGINT, before)


def chat_prompt(engine: EngineClient, messages: list[dict[str, str]], template: str | None) -> dict[str, Any]:
    """Arguments of `submit` for a conversation. template: jinja2 source that replaces the checkpoint's."""
    return {"prompt": engine.render_chat(messages, chat_template=template), "add_special_tokens": False}


def begin_rendering(options: dict[str, Any], template: str | None) -> None:
    """Start the process that renders chats while the model loads, if there is a template. template: as `chat_prompt`.

    Raises CheckpointError.
    """
    files = options.get("files")
    if template is not None or (files is not None and files.chat_template() is not None):
        from xla_engine.text import chat_template  # imports much of what an engine needs

        chat_template.begin_rendering()


def run_prompt(
    prompt: str, defaults: dict[str, Any], options: dict[str, Any], *, chat: bool | None, system: str | None
) -> None:
    """Write a prompt's completion or answer to standard output; exit with the command's status.

    defaults: sampling fields and `chat_template`. options: of the engine. chat: whether the prompt is a chat
    message; None means yes if there is a chat template. Notes go to standard error.
    """
    template = defaults.pop("chat_template", None)
    _common.check_tokenizer(options["model"])
    with _common.startup_errors(), contextlib.ExitStack() as stack:
        if chat is not False:
            begin_rendering(options, template)
        engine = stack.enter_context(_common.load_engine(options, show=sys.stderr.isatty()))
        has_template = template is not None or engine.chat_template is not None
        if chat is None and has_template:
            click.echo("(sent as a chat message; --raw completes the text as it is)", err=True)
        request: dict[str, Any] = {"prompt": prompt}
        if chat or (chat is None and has_template):
            defaults = {"max_tokens": None, **defaults}
            said = [] if system is None else [{"role": "system", "content": system}]
            request = chat_prompt(engine, [*said, {"role": "user", "content": prompt}], template)
        try:
            output = show_answer(engine, lambda: engine.submit(params=SamplingParams(**defaults), **request))
        except BrokenPipeError:
            _common.silence_stdout()
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
