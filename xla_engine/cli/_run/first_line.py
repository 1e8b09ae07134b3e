"""Check the first line for faults of the whole input, so that a wrong file or model is one error, not one a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xla_engine.batch.requests import LineRequest, parse_line
from xla_engine.batch.submit import reads_pictures
from xla_engine.cli._common import NotStarted
from xla_engine.text.parsers.chats import Chat

if TYPE_CHECKING:
    from xla_engine.batch.lines import Line
    from xla_engine.engine.client import EngineClient


def check_first_line(
    line: Line, source: str, model: str | None, defaults: dict[str, Any]
) -> LineRequest | None:
    """Parse the first line; returns None if it is invalid.

    Raises NotStarted for a JSON file without one request a line, and for text if the model has no tokenizer.
    """
    raw = b"" if line.raw is None else line.raw.strip()
    if raw == b"{" or (raw.startswith(b"[") and not _is_a_list_of_values(raw)):
        what = "a JSON array" if raw.startswith(b"[") else "JSON over several lines"
        raise NotStarted(
            f"invalid_json_line: {source} is {what}; write each request on one line (for an array: `jq -c '.[]' "
            f"{source}`), or read an array of rows with --prompt-column NAME"
        )
    request = parse_line(raw, line.number, defaults)
    if not isinstance(request, LineRequest):
        return None
    if not isinstance(request.prompts[0], tuple):
        check_tokenizer(model, ", or write prompts as lists of token ids")
    return request


def check_tokenizer(model: str | None, otherwise: str = "") -> None:
    """Raise NotStarted if a model's directory has no tokenizer, which text needs. otherwise: another remedy."""
    files = Path(model or "")
    if model and (files / "config.json").exists() and not (files / "tokenizer.json").exists():
        raise NotStarted(
            f"no_tokenizer: {model} has no tokenizer.json, which text needs; put the model's tokenizer.json "
            f"there{otherwise}"
        )


def check_template(request: LineRequest | None, engine: EngineClient, model: str | None) -> None:
    """Raise NotStarted if the first request is a chat, and neither it nor the model has a chat template; or if it has
    pictures, which the engine does not read.

    If it is text and the model has a chat template, print how prompts can become chats (except for the embedded
    model, which completes code).
    """
    chat = None if request is None else request.prompts[0]
    if isinstance(chat, Chat) and "chat_template" not in chat.options and engine.chat_template is None:
        raise NotStarted(
            f"no_chat_template: {model or 'the embedded model'} has no chat template, and the first request is a "
            "chat; give one with --chat-template FILE, or write a prompt in place of messages"
        )
    if chat is not None and reads_pictures(chat) and engine.validator.pictures is None:
        raise NotStarted(f"no_pictures: the first request has pictures, and {engine.validator.no_pictures}")
    if isinstance(chat, str) and engine.chat_template is not None and model is not None:
        click.echo(
            "the model has a chat template, but prompts are completed as they are; use --chat to send each as a "
            "message",
            err=True,
        )


def _is_a_list_of_values(raw: bytes) -> bool:
    """Whether the line is a list of plain values: one bad line, not the beginning of an array of requests."""
    try:
        return not any(isinstance(each, dict) for each in json.loads(raw))
    except (ValueError, RecursionError):
        return False
