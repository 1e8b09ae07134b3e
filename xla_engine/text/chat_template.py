"""Render chat messages to a prompt with the checkpoint's template, in a process that can be killed.

A chat template is a program that comes with the weights. jinja2's sandbox denies it access to Python's internals but
does not limit time or memory, so it runs in its own process (`chat_worker`) under limits of the kernel.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

from xla_engine.errors import ChatTemplateError, InvalidRequestError
from xla_engine.model_loader.chat_templates import MAX_TEMPLATE, ChatTemplate
from xla_engine.text.conversation import IMAGE_PART, Message, Skeleton, forms, missing_text, normalised
from xla_engine.text.worker_process import WorkerEndedError, WorkerProcess
from xla_engine.utils.plain import plain as as_plain

__all__ = ["Message", "begin_rendering", "chosen_template", "render_chat"]

CHAT_OPTIONS = (  # arguments of a chat in Python, in addition to those of a request
    "chat_template",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
CPU_LIMIT_S = 5.0  # processor time of one rendering
MAX_CHARACTERS = 1 << 24  # of a rendered conversation
MAX_CONVERSATION = 1 << 26  # bytes of messages and tools as JSON

_CONTEXT = frozenset({"messages", "tools", "add_generation_prompt"})
_TYPES = "type"  # a template that tells parts apart reads their type
_DEVELOPER = ("'developer'", '"developer"')  # in a template that knows this role
_MOST_CHOICES = 4096  # outlines of conversations whose form is remembered
_MOST_TRIED = (
    1 << 16
)  # messages in all forms of one conversation, so that a long one is refused in bounded time
_PROBE = "xla engine probe"
_MARK = "\ue000continue here\ue000 "  # appended to the message to continue; private use characters


PROCESS = WorkerProcess("chat_worker.py")


def begin_rendering() -> None:
    """Start the process in which `render_chat` renders, while something else happens here."""
    PROCESS.start()


def chosen_template(own: ChatTemplate | None, source: str | None) -> ChatTemplate | None:
    """The checkpoint's template, or `source` instead, with the same special tokens."""
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
    process: WorkerProcess | None = None,
) -> str:
    """The prompt for a conversation, equal to that of transformers' `apply_chat_template`.

    Arguments:
        messages: dicts with "role" and "content". Content is text, a list of {"type": "text", "text": ...} and
            {"type": "image"} parts, or None with "tool_calls", whose JSON "arguments" the template sees as objects.
            Text parts alone are joined by newlines, and a text is one part, whichever the template prints.
            What `normalised` reads in other forms is accepted, too.
        template: the checkpoint's, or jinja2 source.
        tools: JSON schemas of functions that the model may call.
        add_generation_prompt: end with the beginning of an assistant message.
        continue_final_message: end inside the last message instead, so that the model continues it.
        chat_template_kwargs: further variables of the template, for example "enable_thinking".
        cpu_limit_s, max_characters: limits on the rendering.
        process: a process of "chat_worker.py", which renders one chat at a time. None: a shared one.

    The template writes special tokens such as the begin token itself, so tokenise the text without adding them.
    With a template that calls `strftime_now`, the prompt depends on the date.

    The prompt has the text of every message. If the template would drop one, or rejects the messages, they are told in
    another form (`conversation.forms`): developer messages as system messages, calls one by one or as text.

    Raises InvalidRequestError for invalid messages. Raises ChatTemplateError if the template is missing, rejects
    the messages, drops the text of one in every form, or exceeds a limit.
    """
    if template is None:
        raise ChatTemplateError(
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "pass chat_template with its text, or use generate with your own prompt"
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set the first to false"
        )
    plain = normalised(as_plain(messages))
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
    worker = process or PROCESS
    in_parts = _TYPES in source and _prints_only_parts(source, worker, cpu_limit_s)
    knows_developer = any(quoted in source for quoted in _DEVELOPER)
    render = partial(_render, source, cpu_limit_s=cpu_limit_s, max_characters=max_characters, process=worker)
    context = {"documents": None} | special_tokens | extra | {"add_generation_prompt": add_generation_prompt}
    outline = Skeleton(plain)

    offers = _offers(list(tools or ()))
    shown = offers[0][0]
    for offered, tried in offers:

        def shows_all(told: list[dict[str, Any]], tried: list[Any] | None = tried) -> bool:
            given = {"messages": _shaped(told, in_parts=in_parts), "tools": tried}
            return outline.dropped(render(context | given)) is None

        known = forms(outline.messages, knows_developer=knows_developer)
        choice = _CHOICES.of((source, in_parts, context, tried), known, shows_all)
        if choice is not None:
            shown = offered
            break
    told = next(islice(forms(plain, knows_developer=knows_developer), choice or 0, None))
    told = _shaped(told, in_parts=in_parts)
    final = _continued(told[-1]) if continue_final_message else ""
    text = render(context | {"messages": told, "tools": shown})
    if choice is None and (dropped := missing_text(plain, text)) is not None:
        raise ChatTemplateError(
            f"the chat template drops the text of messages[{dropped}], whose role is {plain[dropped]['role']!r}; give "
            "it a role that the template shows there"
        )
    return _up_to_mark(text, final) if continue_final_message else text


def _offers(tools: list[Any]) -> list[tuple[list[Any] | None, list[Any] | None]]:
    """Ways to tell a template the tools, with those to try it with, which are one if all are alike for a template.

    Templates of tools alone read a list even if there is none; and some print descriptions that tools may lack.
    """
    if not tools:
        return [(None, None), ([], [])]
    described = _described(tools)
    return [(tools, tools[:1])] if described == tools else [(tools, tools), (described, described)]


def _described(tools: list[Any]) -> list[Any]:
    """The tools, with empty descriptions where they or their parameters have none."""
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            found.append(tool)
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        function = {"description": "", **function}
        if isinstance(schema, Mapping) and isinstance(properties, Mapping):
            described = {
                name: {"description": "", **each} if isinstance(each, Mapping) else each
                for name, each in properties.items()
            }
            function["parameters"] = {**schema, "properties": described}
        found.append({**tool, "function": function})
    return found


class _Choices:
    """The first form of a conversation in which a template shows everything, kept for conversations of one outline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, int | None] = OrderedDict()

    def of(
        self,
        context: object,
        known: Iterable[list[dict[str, Any]]],
        shows_all: Callable[[list[dict[str, Any]]], bool],
    ) -> int | None:
        """The number of the first of the known forms that shows all; None if none does.

        context: what the rendering of an outline depends on beside it. Raises ChatTemplateError if the template
        exceeds its limits.
        """
        iterator = iter(known)
        first = next(iterator)
        key = blake2b(_json([context, first]).encode(), digest_size=16).digest()
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found, tried, messages = None, set[bytes](), 0
        for number, told in enumerate(chain([first], iterator)):
            messages += len(told)
            if number and messages > _MOST_TRIED:
                break
            if (form := blake2b(_json(told).encode(), digest_size=16).digest()) in tried:
                continue
            tried.add(form)
            try:
                if shows_all(told):
                    found = number
                    break
            except ChatTemplateError as error:
                if isinstance(error.__cause__, WorkerEndedError):
                    raise
        with self._lock:
            self._found[key] = found
            while len(self._found) > _MOST_CHOICES:
                self._found.popitem(last=False)
        return found


_CHOICES = _Choices()


def _shaped(messages: list[dict[str, Any]], *, in_parts: bool) -> list[dict[str, Any]]:
    """Contents as the template prints them: all in parts, or as text as far as they are text."""

    def shaped(content: Any) -> Any:
        if in_parts:
            return (
                content
                if isinstance(content, list)
                else [{"type": "text", "text": content}]
                if content
                else []
            )
        if isinstance(content, list) and IMAGE_PART not in content:
            return "\n".join(part["text"] for part in content)
        return content

    return [message | {"content": shaped(message["content"])} for message in messages]


@lru_cache(maxsize=64)
def _prints_only_parts(source: str, process: WorkerProcess, cpu_limit_s: float) -> bool:
    """Whether the template prints text of parts, but drops content that is text, as that of SmolVLM does."""

    def shows(content: object) -> bool:
        context = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
        try:
            limits: Any = {"cpu_limit_s": cpu_limit_s, "max_characters": MAX_CHARACTERS}
            return _PROBE in _render(source, context, process=process, **limits)
        except ChatTemplateError as error:
            if isinstance(error.__cause__, WorkerEndedError):  # which another time may not happen
                raise
            return False

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _continued(message: dict[str, Any]) -> str:
    """Append the mark to the text of a message; returns the text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    *before, last = content
    text = str(last["text"]) if last["type"] == "text" else ""
    message["content"] = [*(before if text else content), {"type": "text", "text": text + _MARK}]
    return text


def _up_to_mark(text: str, final: str) -> str:
    head, mark, tail = text.rpartition(_MARK.rstrip())
    if not mark or final.strip() not in head:
        raise ChatTemplateError(
            "the chat template changes or drops the last message, so it cannot be continued; "
            "use add_generation_prompt"
        )
    # a template that trims messages trims this end, too
    return head if tail.startswith(" ") else head.rstrip()


def _render(
    source: str, context: dict[str, Any], *, cpu_limit_s: float, max_characters: int, process: WorkerProcess
) -> str:
    request = _json({"template": source, "context": context, "max_characters": max_characters})
    if len(request) > MAX_CONVERSATION:
        raise InvalidRequestError(
            f"the conversation has {len(request)} bytes as JSON; at most {MAX_CONVERSATION}"
        )
    if find_spec("jinja2") is None:
        raise ChatTemplateError("chat templates need jinja2: pip install 'jinja2>=3.1.6'")
    try:
        answer = process.ask(cpu_limit_s, request)
    except WorkerEndedError as error:
        raise ChatTemplateError(f"rendering the chat template {error} on these messages") from error
    if "error" in answer:
        raise ChatTemplateError(f"the chat template cannot render these messages ({answer['error']})")
    return str(answer["text"])


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages and tools must be plain JSON values ({error})") from error
