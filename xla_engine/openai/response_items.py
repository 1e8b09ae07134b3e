"""The items of a Responses request, as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.utils.shown import shown
from xla_engine.utils.warn_once import warn_once

# Items of tools that run at OpenAI or in its clients, and of its service: nothing that a model here wrote or can read.
OTHER_ITEMS = frozenset(
    {
        *("additional_tools", "compaction", "compaction_trigger", "configuration_update"),
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call"),
        *("computer_call_output", "file_search_call", "image_generation_call", "local_shell_call"),
        *(
            "local_shell_call_output",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "mcp_list_tools",
        ),
        *("program", "program_output", "shell_call", "shell_call_output", "tool_search_call"),
        *("tool_search_output", "web_search_call"),
    }
)
_ROLES = ("user", "assistant", "system", "developer")


class FieldError(InvalidRequestError):
    """An invalid body. param: the wrong field, possibly nested."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


def items_of(given: object) -> list[Any]:
    """The items of `input`."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise FieldError("input", "must be text or a list of items, and not empty")
    return given


def referenced(item: object) -> str | None:
    """The id that an `item_reference` names; its type may be missing. None for other items."""
    if not isinstance(item, Mapping) or not isinstance(name := item.get("id"), str):
        return None
    kind = item.get("type")
    return name if kind == "item_reference" or (kind is None and item.keys() <= {"id", "type"}) else None


def messages_of(given: object) -> list[dict[str, Any]]:
    """The messages of a chat. What a model wrote in one turn is one message: its reasoning, text and calls."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items_of(given)):
        where = f"[{number}]"
        if not isinstance(item, Mapping):
            raise FieldError("input", f"{where} must be an object")
        if (name := referenced(item)) is not None:
            raise FieldError(
                "input", f"{where} refers to the item {shown(name)}, which is not here; send the item"
            )
        match item.get("type") or "message":
            case "message":
                role = str(item.get("role"))
                if role not in _ROLES:
                    raise FieldError("input", f"{where}.role must be one of {', '.join(_ROLES)}")
                _add_message(messages, role, _content(item.get("content"), where))
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                _add_call(messages, {"id": item.get("call_id"), "type": "function", "function": function})
            case "custom_tool_call":
                custom = {"name": item.get("name"), "input": item.get("input")}
                _add_call(messages, {"id": item.get("call_id"), "type": "custom", "custom": custom})
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                if said := _reasoning(item):
                    turn = _turn(messages)
                    before = turn.get("reasoning_content")
                    turn["reasoning_content"] = f"{before}\n{said}" if before else said
            case str(kind) if kind in OTHER_ITEMS:
                warn_once(
                    "items of type %r are left out of the input: no function or custom tool made them", kind
                )
            case kind:
                raise FieldError(
                    "input",
                    f"{where} has type {shown(kind)}, which is not supported; give messages and function calls",
                )
    if not messages:
        raise FieldError("input", "holds nothing that a model can read; give messages and function calls")
    return messages


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the model's turn, which begins if another's is the last."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    _turn(messages).setdefault("tool_calls", []).append(call)


def _add_message(messages: list[dict[str, Any]], role: str, content: Any) -> None:
    """Add a message. Text of the model joins its turn, unless this has only a text so far: then it is a message."""
    last = messages[-1] if messages else {"role": ""}
    if role != "assistant" or last["role"] != role or not (last["content"] is None or "tool_calls" in last):
        messages.append({"role": role, "content": content})
    elif last["content"] is None:
        last["content"] = content
    elif isinstance(last["content"], str) and isinstance(content, str):
        last["content"] += content
    else:
        messages.append({"role": role, "content": content})


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, or its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = (
            [part.get("text") for part in parts if isinstance(part, Mapping)]
            if isinstance(parts, list)
            else []
        )
        if found := [text for text in texts if isinstance(text, str) and text]:
            return "\n".join(found)
    return ""


def _content(content: object, where: str) -> Any:
    """Text, or the parts of a chat's message if there are pictures. Values of other kinds are shown as JSON."""
    if content is None:
        return ""
    if not isinstance(content, str | list):
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        return content
    parts = [_part(part, where) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: object, where: str) -> dict[str, Any]:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url), **rest}:
            detail = {"detail": rest["detail"]} if rest.get("detail") is not None else {}
            return {"type": "image_url", "image_url": {"url": url, **detail}}
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise FieldError(
        "input", f"{where} holds {shown(kind)}; only text and pictures with an image_url are supported"
    )
