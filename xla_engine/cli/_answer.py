"""Stream one answer of an engine to standard output."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from xla_engine.outputs import RequestOutput

if TYPE_CHECKING:
    from xla_engine.engine.client import EngineClient


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


def note_temperature(fields: Mapping[str, Any]) -> None:
    """Tell a person that sampling is plain if neither they nor the model chose a temperature: small models ramble."""
    if "temperature" not in fields:
        click.echo(
            "(temperature is 1, as the model recommends none; --temperature 0 gives the likeliest text)",
            err=True,
        )


def chat_prompt(engine: EngineClient, messages: list[dict[str, str]], template: str | None) -> dict[str, Any]:
    """Arguments of `submit` for a conversation. template: jinja2 source that replaces the checkpoint's."""
    return {"prompt": engine.render_chat(messages, chat_template=template), "add_special_tokens": False}
