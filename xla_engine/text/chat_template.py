"""Chat messages become a prompt by the checkpoint's own template, in a process that can be killed.

A chat template is a program that comes with the weights. jinja2's sandbox keeps it from Python's internals but sets
no bound to time or memory, so it runs in a process of its own (`chat_worker`) under limits of the kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xla_engine.errors import ChatTemplateError, CheckpointError, InvalidRequestError
from xla_engine.model_loader.gguf.file import GgufFile, is_gguf, open_gguf
from xla_engine.model_loader.json_fields import read_json
from xla_engine.model_loader.model_files import model_path

Message = Mapping[str, Any]

CPU_LIMIT_S = 5.0  # processor time of one rendering
MAX_CHARACTERS = 1 << 24  # of a rendered conversation
MAX_CONVERSATION = 1 << 26  # bytes of messages and tools as JSON
MAX_TEMPLATE = 1 << 20  # bytes of a template

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_CONTEXT = frozenset({"messages", "tools", "add_generation_prompt"})
_MARK = "\ue000continue here\ue000 "  # stands at the end of the message to continue; private use characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The chat templates of a checkpoint.

    sources: jinja2 source by name. "default" is used, or "tool_use" when the request has tools and there is one.
    special_tokens: "bos_token", "eos_token", ... as the template sees them.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @classmethod
    def from_directory(cls, path: Path | str) -> ChatTemplate | None:
        """The templates of a Hugging Face directory or GGUF file, None where it has none. Raises CheckpointError.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` go before tokenizer_config.json, as in
        transformers.
        """
        directory = model_path(path)
        if is_gguf(directory):
            return cls._from_gguf(open_gguf(directory))
        config, tokens = (
            read_json(file) if (file := directory / name).is_file() else {}
            for name in ("tokenizer_config.json", "special_tokens_map.json")
        )
        sources = _files(directory) or _entries(config.get("chat_template"), directory)
        if not sources:
            return None
        return cls(sources=sources, special_tokens=_special_tokens(tokens | config))

    @classmethod
    def _from_gguf(cls, file: GgufFile) -> ChatTemplate | None:
        prefix = "tokenizer.chat_template"
        sources = {
            key.removeprefix(prefix).removeprefix(".") or "default": source
            for key, source in file.metadata.items()
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(source, str)
        }
        tokens = file.get("tokenizer.ggml.tokens") or []
        ids = {f"{name}_token": file.get(f"tokenizer.ggml.{name}_token_id") for name in _SPECIAL_TOKENS}
        special = {
            name: str(tokens[number])
            for name, number in ids.items()
            if isinstance(number, int) and number < len(tokens)
        }
        return cls(sources=sources, special_tokens=special) if sources else None

    def source(self, *, with_tools: bool) -> str:
        """The template to use. Raises ChatTemplateError where only named ones exist."""
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ChatTemplateError(
                f"the model has no default chat template, only {', '.join(sorted(self.sources))}; "
                "pass chat_template with the text of one"
            )
        return self.sources[name]


def chosen_template(own: ChatTemplate | None, source: str | None) -> ChatTemplate | None:
    """A checkpoint's own template, or `source` in its place, which sees the same special tokens."""
    if source is None:
        return own
    return ChatTemplate(sources={"default": source}, special_tokens={} if own is None else own.special_tokens)


def render_chat(
    messages: Sequence[Message],
    template: ChatTemplate | str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cpu_limit_s: float = CPU_LIMIT_S,
    max_characters: int = MAX_CHARACTERS,
) -> str:
    """The prompt for a conversation, as transformers' `apply_chat_template` makes it.

    Arguments:
        messages: dicts with "role" and "content". Content is text, a list of {"type": "text", "text": ...} parts
            (joined by newlines), or None beside "tool_calls", whose JSON "arguments" the template sees as objects.
        template: of the checkpoint, or jinja2 source.
        tools: JSON schemas of functions the model may call.
        add_generation_prompt: end with the beginning of an assistant's message.
        continue_final_message: end inside the last message instead, so that the model goes on with it.
        chat_template_kwargs: further variables of the template, "enable_thinking" for instance.
        cpu_limit_s, max_characters: a rendering beyond either is an error.

    The begin token is in the text where the template puts one: tokenise it without adding special tokens. A
    template that asks for `strftime_now` makes the prompt depend on the day.

    Raises InvalidRequestError for messages that cannot be, ChatTemplateError for a missing template, one that
    refuses these messages, and one that goes beyond a limit.
    """
    if template is None:
        raise ChatTemplateError(
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "pass chat_template with its text, or use generate with a prompt of your own"
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set the first to false"
        )
    plain = _plain_messages(messages)
    final = str(plain[-1].get("content") or "")
    if continue_final_message:
        plain[-1]["content"] = final + _MARK
    extra = dict(chat_template_kwargs or {})
    if reserved := sorted(_CONTEXT & extra.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {reserved[0]!r}; use the field of that name"
        )
    if isinstance(template, str):
        source, special_tokens = template, {}
    else:
        source, special_tokens = template.source(with_tools=bool(tools)), dict(template.special_tokens)
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE}")
    given = {
        "messages": plain,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    context = {"documents": None} | special_tokens | extra | given
    text = _render(source, context, cpu_limit_s, max_characters)
    return _up_to_mark(text, final) if continue_final_message else text


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a 'role' that is text")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(
            _text_of(f"{where}.content[{n}]", part) for n, part in enumerate(content)
        )
    elif content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"{where} has no content; give text")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be text or a list of text parts")
    if (calls := message.get("tool_calls")) is not None:
        plain["tool_calls"] = _plain_calls(f"{where}.tool_calls", calls)
    return plain


def _text_of(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where} is {kind!r}; only parts {{'type': 'text', 'text': ...}} are supported"
    )


def _plain_calls(where: str, calls: object) -> list[Any]:
    """Tool calls with their arguments as objects: OpenAI sends them as JSON text, templates expect values."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{where} must be a list of objects")
    plain = []
    for n, call in enumerate(calls):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(arguments, str):
            try:
                call = {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{where}[{n}].function.arguments is no JSON ({error})") from error
        plain.append(call)
    return plain


def _up_to_mark(text: str, final: str) -> str:
    head, mark, tail = text.rpartition(_MARK.rstrip())
    if not mark or final.strip() not in head:
        raise ChatTemplateError(
            "the chat template changes or drops the last message, so it cannot be continued; "
            "use add_generation_prompt"
        )
    return (
        head if tail.startswith(" ") else head.rstrip()
    )  # a template that trims the message trims this end too


def _render(source: str, context: dict[str, Any], cpu_limit_s: float, max_characters: int) -> str:
    try:
        request = json.dumps(
            {
                "template": source,
                "context": context,
                "cpu_limit_s": cpu_limit_s,
                "max_characters": max_characters,
            }
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages and tools must be plain JSON values ({error})") from error
    if len(request) > MAX_CONVERSATION:
        raise InvalidRequestError(
            f"the conversation has {len(request)} bytes as JSON; at most {MAX_CONVERSATION}"
        )
    answer = _WORKER.ask(request, cpu_limit_s)
    if "error" in answer:
        raise ChatTemplateError(f"the chat template cannot render these messages ({answer['error']})")
    return answer["text"]


class _Worker:
    """The rendering process, started when first needed and again after it was killed. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, request: str, cpu_limit_s: float) -> dict[str, str]:
        """Send one line, read one line. Raises ChatTemplateError when the process does not survive it."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            except BaseException:  # an interrupt: the answer must not be read by the next one
                self.stop()
                raise
            if answer.endswith("\n"):
                return dict(json.loads(answer))
            status = process.wait()
            self.stop()
        if status == -signal.SIGPROF:
            raise ChatTemplateError(
                f"the chat template used more than {cpu_limit_s:g} s of processor time on these messages"
            )
        raise ChatTemplateError(f"rendering the chat template ended its process (status {status})")

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # inherited by a fork: it answers the parent
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.stop()
            if find_spec("jinja2") is None:
                raise ChatTemplateError("chat templates need jinja2: pip install 'jinja2>=3.1.6'")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",  # json escapes everything else, lone surrogates too
            )
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # what was not flushed has no reader
                process.communicate()


_WORKER = _Worker()
atexit.register(_WORKER.stop)


def _files(directory: Path) -> dict[str, str]:
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        named["default"] = default
    return {name: _read_template(file) for name, file in named.items()}


def _read_template(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_TEMPLATE:
            raise CheckpointError(f"{file}: larger than {MAX_TEMPLATE >> 20} MiB. Download the file again")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Download the file again") from error


def _entries(value: Any, directory: Path) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: text, or a list of {"name", "template"}."""
    if value is None:
        return {}
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in entries
    ):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text or a list of names and "
            "templates. Download the file again"
        )
    return {entry["name"]: entry["template"] for entry in entries}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_TOKENS):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
