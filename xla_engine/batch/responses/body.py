"""Turn the body of a Responses request into the body of the equivalent chat, which has the same bits."""

from collections.abc import Mapping, Sequence
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.utils.json_line import kind
from xla_engine.utils.shown import shown

# Fields of features that this server lacks, with the values that have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled", "auto"),
    "max_tool_calls": (None,),
    "service_tier": (None, "auto", "default"),
    "n": (None, 1),
    "logprobs": (None, False),
    "return_token_ids": (None, False),
}
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
# Parts of items that only other servers produce, so that there is nothing to include.
_NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class FieldError(InvalidRequestError):
    """An invalid body. param: the wrong field, possibly nested."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the equivalent chat. `input` must hold the whole conversation. Raises FieldError."""
    rest = {name: value for name, value in body.items() if name not in ("store", "previous_response_id")}
    if not isinstance(body.get("store"), bool | None):
        raise _wrong("store", f"must be true or false, not {body['store']!r}")
    for name, allowed in _NEUTRAL.items():
        value = rest.pop(name, None)
        if not any(value is each or (value == each and type(value) is type(each)) for each in allowed):
            raise _wrong(name, f"is not supported by this path; leave it out, not {value!r}")
    include = rest.pop("include", None) or []
    if not isinstance(include, list):
        raise _wrong("include", f"must be a list, not {kind(include)}")
    for name in include:
        if name not in (LOGPROBS, *_NOTHING_TO_INCLUDE):
            raise _wrong("include", f"has {shown(name)}, which this path does not support; leave it out")
    top = rest.pop("top_logprobs", None)
    if top is not None and (
        isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS
    ):
        raise _wrong("top_logprobs", f"must be from 0 to {MAX_LOGPROBS}, not {shown(top)}")
    messages = []
    if (instructions := rest.pop("instructions", None)) is not None:
        if not isinstance(instructions, str):
            raise _wrong("instructions", "must be text")
        messages.append({"role": "system", "content": instructions})
    messages += _messages(rest.pop("input", None))
    chat: dict[str, Any] = {"messages": messages}
    if top or LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    if (most := rest.pop("max_output_tokens", None)) is not None:
        chat["max_completion_tokens"] = most
    if tools := rest.pop("tools", None):
        chat["tools"] = _tools(tools)
    if (choice := rest.pop("tool_choice", None)) is not None:
        chat["tool_choice"] = choice
    if (options := rest.pop("stream_options", None)) not in (None, {}):
        raise _wrong("stream_options", f"must be empty here, not {options!r}")
    text, reasoning = rest.pop("text", None) or {}, rest.pop("reasoning", None) or {}
    if not isinstance(text, Mapping) or not isinstance(reasoning, Mapping):
        raise _wrong("text", "and reasoning must be objects")
    _check_names("text", text, ("format", "verbosity"))
    _check_names("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    for name, value in reasoning.items():
        if not isinstance(value, str | None):
            raise _wrong(f"reasoning.{name}", f"must be a string, not {kind(value)}")
    if (form := text.get("format")) is not None:
        chat["response_format"] = _format(form)
    if (effort := reasoning.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (verbosity := text.get("verbosity")) is not None:
        chat["verbosity"] = verbosity
    return {**rest, **chat}  # remaining fields are a chat's, or are rejected later by name


def items_of(given: object) -> list[Any]:
    """The items of `input`."""
    return [{"role": "user", "content": given}] if isinstance(given, str) and given else _listed(given)


def _listed(given: object) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise _wrong("input", "must be text or a list of items, and not empty")
    return given


def _messages(given: object) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items_of(given)):
        where = f"[{number}]"
        if not isinstance(item, Mapping):
            raise _wrong("input", f"{where} must be an object")
        match item.get("type", "message"):
            case "message":
                role = _ROLES.get(str(item.get("role")))
                if role is None:
                    raise _wrong("input", f"{where}.role must be one of {', '.join(_ROLES)}")
                messages.append({"role": role, "content": _text(item.get("content"), where)})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1].get("tool_calls"):
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                content = _text(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                continue  # reasoning of an earlier turn; chat templates drop it, too
            case kind:
                raise _wrong(
                    "input",
                    f"{where} has type {kind!r}, which is not supported; give messages and function calls",
                )
    return messages


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong("input", f"{where} must hold text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise _wrong("input", f"{where} holds {kind!r}; only text is supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise _wrong("tools", "must be a list of functions")
    found = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _wrong("tools", f"[{number}] is not a function; other tools are not supported")
        function = {key: value for key, value in tool.items() if key != "type" and value is not None}
        found.append({"type": "function", "function": function})
    return found


def _format(form: object) -> dict[str, Any]:
    if not isinstance(form, Mapping):
        raise _wrong("text", "format must be an object")
    if form.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {key: form[key] for key in ("name", "schema") if key in form},
        }
    return dict(form)


def _check_names(param: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise _wrong(f"{param}.{name[:100]}", f"is not known; {param} may hold {' and '.join(known)}")


def _wrong(param: str, message: str) -> FieldError:
    return FieldError(param, message)
