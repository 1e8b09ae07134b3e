"""A conversation as clients send it, in the form that chat templates read. Pure functions; nothing is rendered.

Clients send back what they were given: `null` for absent fields, arguments that were cut off, calls of OpenAI's older
API. And templates differ in what they can show: some take one system message, one call per message, arguments as
objects or as text. `normalised` reads every client's form, and `forms` lists the ways to say the same to a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise, product
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.utils.plain import plain as as_plain
from xla_engine.utils.shown import shown

Message = Mapping[str, Any]

IMAGE_PART = {"type": "image"}
INSTRUCTIONS = ("system", "developer")  # roles
CUSTOM_INPUT = "input"  # the one argument of a custom tool, which is a text
ARGUMENTS = "arguments"  # the name under which a template that needs an object gets arguments that are none
_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "summary_text", "redacted_thinking")
_REASONING = ("reasoning_content", "reasoning")
_DEPTH = 64  # levels of nested arguments that are passed to a template as JSON
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # what templates of Mistral's models demand


def normalised(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with text or parts as content, calls in `tool_calls` and results in the role "tool".

    Content parts are {"type": "text", "text": ...} and {"type": "image"}. Arguments are parsed JSON, or the text as it
    is if they are none. Raises InvalidRequestError, which names the place.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    found: list[dict[str, Any]] = []
    latest: str | None = None  # id of the last call in OpenAI's older form, whose results have none
    for index, given in enumerate(messages):
        message = _message(f"messages[{index}]", given)
        if isinstance(old := message.pop("function_call", None), Mapping) and "tool_calls" not in message:
            latest = f"call_{index}"
            call = {"id": latest, "type": "function", "function": old}
            message["tool_calls"] = _calls(f"messages[{index}].function_call", [call])
        if message["role"] == "function":
            message["role"] = "tool"
            if latest is not None:
                message.setdefault("tool_call_id", latest)
        found.append(_with_content(f"messages[{index}]", message))
    return found


def _message(where: str, given: object) -> dict[str, Any]:
    """One message with its own content and calls. A null field is absent."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a 'role' that is text")
    message = {name: plain for name, value in given.items() if (plain := as_plain(value)) is not None}
    content = message.get("content")
    thoughts: list[str] = []
    if isinstance(content, list | tuple):
        parts = [_part(f"{where}.content[{n}]", part, thoughts) for n, part in enumerate(content)]
        message["content"] = [part for part in parts if part is not None]
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be text or a list of text parts")
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    told = [value for name in _REASONING if isinstance(value := message.get(name), str)]
    if isinstance(message.get("reasoning_content", ""), str):
        if reasoning := next(iter(told), "".join(thoughts)):
            message["reasoning_content"] = reasoning
    else:
        del message["reasoning_content"]
    return message


def _with_content(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with "content", which only those with calls may leave null."""
    content = message.setdefault("content", None)
    if not content and isinstance(refusal := message.get("refusal"), str):
        content = message["content"] = refusal or content
    if content is None and "tool_calls" not in message:
        if message["role"] not in ("assistant", "tool"):
            raise InvalidRequestError(f"{where} has no content; give text")
        message["content"] = ""
    return message


def _part(where: str, part: object, thoughts: list[str]) -> dict[str, Any] | None:
    """One part of a content. None for reasoning, which is added to `thoughts`."""
    match part:
        case str(text):
            return {"type": "text", "text": text}
        case {"type": kind, "text": str(text)} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image"} if part == IMAGE_PART:
            return dict(IMAGE_PART)
        case {"type": kind, **rest} if kind in _THOUGHTS:
            thoughts += [told for name in ("thinking", "text") if isinstance(told := rest.get(name), str)]
            return None
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{where} is {shown(kind)}; only parts {{'type': 'text', 'text': ...}} are supported, and pictures in chats "
        "with models that read them"
    )


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Tool calls with parsed arguments: OpenAI sends arguments as JSON text, but templates expect objects."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{where} must be a list of objects")
    return [_call(call) for call in calls]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function, custom = call.get("function"), call.get("custom")
    if isinstance(custom, Mapping) and not isinstance(function, Mapping):
        function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input") or ""}}
        call = {name: value for name, value in call.items() if name != "custom"} | {"type": "function"}
    if not isinstance(function, Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": parsed_arguments(function.get("arguments"))}}


def parsed_arguments(arguments: object) -> Any:
    """Arguments of a call as JSON values; text that is none, or that no prompt can hold, stays text."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return as_plain(arguments)
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return arguments if arguments.strip() else {}
    return {} if value is None else value if _is_shallow(value) else arguments


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
    return not level


def forms(messages: list[dict[str, Any]], *, knows_developer: bool) -> Iterator[list[dict[str, Any]]]:
    """Ways to tell a template the same conversation, the most faithful first. Several may be equal.

    knows_developer: whether the template has a role "developer"; otherwise this is a system message, as at OpenAI.
    """
    begin = messages if knows_developer else _developers_as_system(messages)
    roles = [message["role"] for message in messages]
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    leads = (_same, _one_system, _system_of_user) if roles[0] in INSTRUCTIONS else (_same,)
    repeats = any(one == other and one in ("user", "assistant") for one, other in pairwise(roles))
    is_late = any(role in INSTRUCTIONS for role in roles[_leading(messages) :])
    orders = (_same, _late_of_users, _alternating) if is_late or repeats else (_same,)
    if roles[_leading(messages) :][:1] == ["assistant"]:
        orders = (*orders, _user_first)
    if not has_calls:
        yield from (order(lead(begin)) for lead, order in product(leads, orders))
        return
    for lead, calls, order in product(
        leads, (_same, _one_call_each, _calls_as_text, _results_of_users), orders
    ):
        told = calls(order(lead(begin)))
        yield told
        for empty, arguments in product((False, True), (_same_arguments, _as_text, _as_object)):
            yield [_shaped(message, arguments, empty=empty) for message in told]


def _same(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages


def _developers_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"role": "system"} if message["role"] == "developer" else message for message in messages
    ]


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system messages at the beginning as one."""
    found, leading = _developers_as_system(messages), _leading(messages)
    return found if leading < 2 else [_joined(found[:leading]), *found[leading:]]


def _leading(messages: list[dict[str, Any]]) -> int:
    """The number of system and developer messages at the beginning."""
    return next((n for n, each in enumerate(messages) if each["role"] not in INSTRUCTIONS), len(messages))


def _system_of_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without system messages: the first ones as the beginning of the user's first message, or as a
    message of the user if none follows them."""
    found = _one_system(messages)
    if [message["role"] for message in found[:2]] != ["system", "user"]:
        return [found[0] | {"role": "user"}, *found[1:]] if found[0]["role"] == "system" else found
    return [_joined(found[:2]) | {"role": "user"}, *found[2:]]


def _late_of_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take system messages at the beginning only: each later one, where it stands, as the beginning
    of the user's message that follows it; else as the end of the one before it; else as a message of the user.

    One between a call and its results follows the results.
    """
    leading = _leading(messages)
    told, late = messages[:leading], list[dict[str, Any]]()
    for message in messages[leading:]:
        if message["role"] in INSTRUCTIONS:
            late.append(message | {"role": "user"})
            continue
        if message["role"] == "user":
            message, late = _joined([*late, message]) if late else message, []
        elif message["role"] != "tool":
            _add_late(told, late)
            late = []
        told.append(message)
    _add_late(told, late)
    return told


def _add_late(told: list[dict[str, Any]], late: list[dict[str, Any]]) -> None:
    """Add messages of the user as one, at the end of the user's message before them if there is one."""
    if late and told and told[-1]["role"] == "user":
        told[-1] = _joined([told[-1], *late])
    elif late:
        told.append(_joined(late))


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates in which user and assistant take turns: their messages that follow one another as one."""
    return _in_turns(_late_of_users(messages), lambda role: role in ("user", "assistant"))


def _user_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates in which the user begins: an empty message of the user before an assistant that does."""
    told = _alternating(messages)
    leading = _leading(told)
    return [*told[:leading], {"role": "user", "content": ""}, *told[leading:]]


def _in_turns(messages: list[dict[str, Any]], joins: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Messages of one role that follow one another as one, if the role is one that joins. Calls end a message."""
    runs: list[list[dict[str, Any]]] = []
    for message in messages:
        last = runs[-1][-1] if runs else {}
        if last.get("role") == message["role"] and joins(message["role"]) and "tool_calls" not in last:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else {**run[-1], **_joined(run)} for run in runs]


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Messages of one role as one message."""
    contents = [message["content"] or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return messages[0] | {"content": "\n\n".join(filter(None, contents))}
    return messages[0] | {"content": [part for content in contents for part in _parts(content)]}


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, with its result after it; text before calls in another."""
    told: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if not message.get("tool_calls"):
            told.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        if message["content"]:
            told.append({name: value for name, value in message.items() if name != "tool_calls"})
        for call in message["tool_calls"]:
            told.append(message | {"content": None, "tool_calls": [call]})
            name = call.get("id")
            at_result = next((n for n, each in enumerate(results) if each.get("tool_call_id") == name), None)
            if at_result is not None:
                told.append(results.pop(at_result))
        told += results
    return told


def _calls_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls written out in the assistant's text."""
    return [_with_written_calls(message) if message.get("tool_calls") else message for message in messages]


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    written = "\n".join(_written(call) for call in message["tool_calls"])
    content: Any = [*_parts(message["content"]), {"type": "text", "text": written}]
    if IMAGE_PART not in content:
        content = "\n".join(part["text"] for part in content)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _results_of_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without tools: calls written out, and their results in messages of the user."""
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages
    told: list[dict[str, Any]] = []
    for message in _calls_as_text(messages):
        if message["role"] == "tool":
            message = {name: value for name, value in message.items() if name != "tool_call_id"}
            message["role"] = "user"
        told.append(message)
    return _in_turns(told, lambda role: role != "system")


def _written(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return json.dumps(function if isinstance(function, Mapping) else dict(call), ensure_ascii=False)


def _same_arguments(arguments: Any) -> Any:
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    return arguments if isinstance(arguments, dict) else {ARGUMENTS: arguments}


def _shaped(message: dict[str, Any], arguments: Callable[[Any], Any], *, empty: bool) -> dict[str, Any]:
    """A message with ids of nine characters. arguments: changes those of calls. empty: "" in place of null."""
    shaped = dict(message)
    if isinstance(name := message.get("tool_call_id"), str):
        shaped["tool_call_id"] = _short_id(name)
    if calls := message.get("tool_calls"):
        shaped["tool_calls"] = [_shaped_call(call, arguments) for call in calls]
        if empty and message["content"] is None:
            shaped["content"] = ""
    return shaped


def _shaped_call(call: Mapping[str, Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    shaped, function = dict(call), call.get("function")
    if isinstance(name := call.get("id"), str):
        shaped["id"] = _short_id(name)
    if isinstance(function, Mapping):
        shaped["function"] = {**function, "arguments": arguments(function.get("arguments"))}
    return shaped


def _short_id(name: str) -> str:
    return name if _SHORT_ID.fullmatch(name) else blake2b(name.encode(), digest_size=5).hexdigest()[:9]


class Skeleton:
    """The outline of a conversation: a short mark in place of each text and each function's name.

    Whether a template shows all marks depends on roles, their order and the kinds of contents alone, so the answer can
    be kept for all conversations of the same outline.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._ids: dict[object, str] = {}
        self.marks: list[tuple[int, str]] = []  # of each text and call: number of its message, and the mark
        self.messages = [self._outline(number, message) for number, message in enumerate(messages)]

    def dropped(self, prompt: str) -> int | None:
        """The number of the first message of which a rendered prompt lacks a mark."""
        told = prompt.lower()
        return next((number for number, mark in self.marks if mark not in told), None)

    def _outline(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        outline: dict[str, Any] = {"role": message["role"], "content": self._content(number, content)}
        if isinstance(name := message.get("tool_call_id"), str):
            outline["tool_call_id"] = self._id(name)
        if isinstance(name := message.get("name"), str):
            outline["name"] = name[:64]
        for name in ("reasoning_content", "thinking"):
            if name in message:
                outline[name] = "x"
        if calls := message.get("tool_calls"):
            outline["tool_calls"] = [self._call(number, call) for call in calls]
        return outline

    def _content(self, number: int, content: Any) -> Any:
        if isinstance(content, list):
            return [
                {"type": "text", "text": self._content(number, part["text"])} if "text" in part else part
                for part in content
            ]
        return self._mark(number) if isinstance(content, str) and content.strip() else content

    def _mark(self, number: int) -> str:
        self.marks.append((number, mark := f"zq{len(self.marks)}qz"))
        return mark

    def _id(self, name: object) -> str:
        form = "i{:08d}" if isinstance(name, str) and _SHORT_ID.fullmatch(name) else "call_{}"
        return self._ids.setdefault(name, form.format(len(self._ids)))

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        outline: dict[str, Any] = {"type": "function"}
        if isinstance(name := call.get("id"), str):
            outline["id"] = self._id(name)
        if isinstance(function := call.get("function"), Mapping):
            arguments = function.get("arguments")
            told = {"a": "x"} if isinstance(arguments, dict) and arguments else arguments
            told = "x" if isinstance(arguments, str) else [] if isinstance(arguments, list) else told
            told = 1 if isinstance(arguments, int | float) else told
            outline["function"] = {"name": self._mark(number), "arguments": told}
        return outline


def missing_text(messages: Sequence[Mapping[str, Any]], prompt: str) -> int | None:
    """The number of the first message whose text a prompt lacks, plain or as JSON, whatever its blanks."""
    told = _compact(prompt)
    for number, message in enumerate(messages):
        for part in _parts(message["content"]):
            text = part.get("text", "")
            if (
                _compact(text) not in told
                and _compact(json.dumps(text, ensure_ascii=False)[1:-1]) not in told
            ):
                return number
    return None


def _compact(text: str) -> str:
    return "".join(text.split())
