"""Render chat messages to a prompt with the checkpoint's template, in a process that can be killed.

A chat template is a program that comes with the weights. jinja2's sandbox denies it access to Python's internals but
does not limit time or memory, so it runs in its own process (`chat_worker`) under limits of the kernel.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from xla_engine.errors import ChatTemplateError, InvalidRequestError
from xla_engine.model_loader.chat_templates import MAX_TEMPLATE, ChatTemplate
from xla_engine.text.worker_process import WorkerEndedError, WorkerProcess
from xla_engine.utils.plain import plain as as_plain

Message = Mapping[str, Any]

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
IMAGE_PART = {"type": "image"}
_TYPES = "type"  # a template that tells parts apart reads their type
_PROBE = "xla engine probe"
_MARK = "\ue000continue here\ue000 "  # appended to the message to continue; private use characters


_PROCESS = WorkerProcess("chat_worker.py")


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
            template: the checkpoint's, or jinja2 source.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: end inside the last message instead, so that the model continues it.
            chat_template_kwargs: further variables of the template, for example "enable_thinking".
            cpu_limit_s, max_characters: limits on the rendering.
            process: a process of "chat_worker.py", which renders one chat at a time. None: a shared one.

    The template writes special tokens such as the begin token itself, so tokenise the text without adding them.
    With a template that calls `strftime_now`, the prompt depends on the date.

    Raises InvalidRequestError for invalid messages. Raises ChatTemplateError if the template is missing, rejects
    the messages or exceeds a limit.
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
    plain = _plain_messages(as_plain(messages))
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
    worker = process or _PROCESS
    plain = _shaped(plain, in_parts=_TYPES in source and _prints_only_parts(source, worker, cpu_limit_s))
    final = _continued(plain[-1]) if continue_final_message else ""
    given = {
        "messages": plain,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    context = {"documents": None} | special_tokens | extra | given
    text = _render(source, context, cpu_limit_s, max_characters, worker)
    return _up_to_mark(text, final) if continue_final_message else text


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a 'role' that is text")
    plain = {name: as_plain(value) for name, value in message.items()}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = [_part(f"{where}.content[{n}]", part) for n, part in enumerate(content)]
    elif content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"{where} has no content; give text")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be text or a list of text parts")
    if (calls := plain.get("tool_calls")) is not None:
        plain["tool_calls"] = _plain_calls(f"{where}.tool_calls", calls)
    return plain


def _part(where: str, part: object) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image"} if part == IMAGE_PART:
            return dict(IMAGE_PART)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where} is {kind!r}; only parts {{'type': 'text', 'text': ...}} are supported, and pictures in chats with "
        "models that read them"
    )


def _shaped(messages: list[dict[str, Any]], *, in_parts: bool) -> list[dict[str, Any]]:
    """Contents as the template prints them: all in parts, or as text as far as they are text."""
    for message in messages:
        content = message.get("content")
        if in_parts:
            if not isinstance(content, list):
                message["content"] = [{"type": "text", "text": content}] if content else []
        elif isinstance(content, list) and IMAGE_PART not in content:
            message["content"] = "\n".join(part["text"] for part in content)
    return messages


@lru_cache(maxsize=64)
def _prints_only_parts(source: str, process: WorkerProcess, cpu_limit_s: float) -> bool:
    """Whether the template prints text of parts, but drops content that is text, as that of SmolVLM does."""

    def shows(content: object) -> bool:
        context = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
        try:
            return _PROBE in _render(source, context, cpu_limit_s, MAX_CHARACTERS, process)
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


def _plain_calls(where: str, calls: object) -> list[Any]:
    """Tool calls with parsed arguments: OpenAI sends arguments as JSON text, but templates expect objects."""
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
    # a template that trims messages trims this end, too
    return head if tail.startswith(" ") else head.rstrip()


def _render(
    source: str, context: dict[str, Any], cpu_limit_s: float, max_characters: int, process: WorkerProcess
) -> str:
    try:
        request = json.dumps({"template": source, "context": context, "max_characters": max_characters})
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages and tools must be plain JSON values ({error})") from error
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
