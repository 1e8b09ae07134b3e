"""Bodies of Anthropic's Messages API, turned into those of chats with the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xla_engine.server.errors import ApiError, invalid
from xla_engine.utils.json_line import kind
from xla_engine.utils.shown import shown

# Fields that change no token here: for accounts, caches, and services of Anthropic's own.
_WITHOUT_EFFECT = (
    "betas",
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "mcp_servers",
    "metadata",
    "service_tier",
    "speed",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_RENAMED = {"stop_sequences": "stop"}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the equivalent chat. Raises ApiError, which names the field."""
    rest = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT and value is not None}
    messages = _system(rest.pop("system", None))
    given = rest.pop("messages", None)
    if not isinstance(given, list) or not given:
        raise invalid("messages must be a list, and not empty", "messages")
    for number, message in enumerate(given):
        messages += _message(message, f"messages[{number}]")
    chat: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}  # the model continues it
    if (tools := rest.pop("tools", None)) is not None:
        chat["tools"] = _tools(tools)
    if (choice := rest.pop("tool_choice", None)) is not None:
        chat |= _choice(choice)
    if (thinking := rest.pop("thinking", None)) is not None:
        wanted = _typed(thinking, "thinking", ("enabled", "disabled", "adaptive"))
        given_kwargs = rest.pop("chat_template_kwargs", None) or {}
        if not isinstance(given_kwargs, Mapping):
            raise invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": wanted != "disabled", **given_kwargs}
    output = rest.pop("output_config", None) or {}
    if not isinstance(output, Mapping):
        raise invalid("output_config must be an object", "output_config")
    if (effort := output.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (form := rest.pop("output_format", None) or output.get("format")) is not None:
        chat["response_format"] = _format(form)
    for theirs, ours in _RENAMED.items():
        if (value := rest.pop(theirs, None)) is not None:
            chat[ours] = value
    return {**rest, **chat}  # the others are a chat's, or are refused later by name


def _system(system: object) -> list[dict[str, Any]]:
    if system is None or system == "" or system == []:
        return []
    texts = (
        [system] if isinstance(system, str) else [_text(part, "system") for part in _blocks(system, "system")]
    )
    return [{"role": "system", "content": "\n\n".join(texts)}]


def _text(block: object, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise _wrong(where, block)


def _blocks(content: object, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise invalid(
            f"{where} must be text or a list of blocks, not {kind(content)}", where.partition("[")[0]
        )
    return content


def _message(message: object, where: str) -> list[dict[str, Any]]:
    """The chat's messages for one of these, whose results of tools are messages of their own there."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ("user", "assistant", "system"):
        raise invalid(f"{where} must be an object with the role user or assistant", "messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, f"{where}.content")
    if role == "assistant":
        return [_answer(blocks, f"{where}.content")]
    found: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []  # of the user
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if not (isinstance(block, Mapping) and block.get("type") == "tool_result"):
            parts += _user_parts(block, place)
            continue
        if parts:
            found.append({"role": role, "content": parts})
        result = block.get("content")
        told = _parts(result if result is not None else "", place)
        texts = [part["text"] for part in told if part["type"] == "text"]
        parts = [
            part for part in told if part["type"] != "text"
        ]  # pictures, which templates read in users' messages
        found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": "\n".join(texts)})
    if parts or not found:
        found.append({"role": role, "content": parts})
    return found


def _parts(content: object, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        part
        for number, block in enumerate(_blocks(content, where))
        for part in _user_parts(block, f"{where}[{number}]")
    ]


def _user_parts(block: object, where: str) -> list[dict[str, Any]]:
    match block:
        case {"type": "text", "text": str(text)}:
            return [{"type": "text", "text": text}]
        case {"type": "image", "source": {"type": "base64", "media_type": str(media), "data": str(data)}}:
            return [{"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}]
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return [{"type": "image_url", "image_url": {"url": url}}]
        case {"type": "document", "source": {"type": "text", "data": str(text)}, **rest}:
            title = rest.get("title")
            return [{"type": "text", "text": f"{title}\n{text}" if isinstance(title, str) else text}]
        case {"type": "document", "source": {"type": "content", "content": content}}:
            return _parts(content, where)
        case {"type": "search_result", "content": content, **rest}:
            heads = [head for name in ("title", "source") if isinstance(head := rest.get(name), str)]
            return [{"type": "text", "text": head} for head in heads] + _parts(content, where)
    raise _wrong(where, block)


def _answer(blocks: list[Any], where: str) -> dict[str, Any]:
    """An assistant's message. Reasoning goes to the template, which decides whether the model sees it again."""
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "name": str(name), **rest}:
                given = rest.get("input")
                function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
                calls.append({"id": rest.get("id"), "type": "function", "function": function})
            case _:
                raise _wrong(f"{where}[{number}]", block)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _wrong(where: str, block: object) -> ApiError:
    found = block.get("type") if isinstance(block, Mapping) else kind(block)
    return invalid(f"{where} is {shown(found)}, which is not supported here", where.partition("[")[0])


def _tools(tools: object) -> list[dict[str, Any]]:
    """Functions, and as they are the tools that run at Anthropic, which are left out later."""
    if not isinstance(tools, list):
        raise invalid(f"tools must be a list, not {kind(tools)}", "tools")
    found = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise invalid(f"tools[{number}] must be an object, not {kind(tool)}", "tools")
        if tool.get("type") not in (None, "custom"):
            found.append({"type": tool["type"]})
            continue
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _choice(choice: object) -> dict[str, Any]:
    wanted = _typed(choice, "tool_choice", ("auto", "any", "tool", "none"))
    assert isinstance(choice, Mapping)
    found: dict[str, Any] = {"tool_choice": _CHOICES.get(wanted)}
    if wanted == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if (alone := choice.get("disable_parallel_tool_use")) is not None:
        if not isinstance(alone, bool):
            raise invalid("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
        found["parallel_tool_calls"] = not alone
    return found


def _format(form: object) -> dict[str, Any]:
    _typed(form, "output_config", ("json_schema",))
    assert isinstance(form, Mapping)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


def _typed(value: object, name: str, known: tuple[str, ...]) -> str:
    """The `type` of an object, one of those known."""
    found = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(found, str) or found not in known:
        raise invalid(f"{name} must be an object whose type is one of {', '.join(known)}", name)
    return found
