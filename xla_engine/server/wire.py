"""From the body of a POST to a request. The parser is that of batch lines, so both give the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_engine.batch.requests import CHAT_URL, Chat, LineError, LineRequest, parse_record
from xla_engine.server.errors import ApiError, refused
from xla_engine.server.parsers.choose import Dialect, forced
from xla_engine.server.parsers.scan import Parser
from xla_engine.server.tools import Tools, take_tools
from xla_engine.utils.json_line import load_object

NO_TOOLS, NO_DIALECT = Tools(), Dialect()
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One POST that asks for text.

    request: what a batch line with this body would ask for.
    stream: answer piece by piece. include_usage: a last piece tells the tokens used; continuous_usage: each does.
    return_token_ids: answers tell the ids of prompt and completion.
    tools: what a chat may call. dialect: how the model writes that.
    """

    request: LineRequest
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tools: Tools = NO_TOOLS
    dialect: Dialect = NO_DIALECT

    def parser(self, *, thinking: bool) -> Parser | None:
        """A parser for one choice of a chat; None where its whole text is content.

        thinking: the prompt ended in the opening tag of the reasoning.
        """
        if not self.request.is_chat:
            return None
        if self.tools.is_forced:
            return forced(self.tools.name)
        return self.dialect.parser(tools=self.tools.choice == "auto", thinking=thinking)

    @property
    def sequences(self) -> int:
        """Choices of the answer."""
        return len(self.request.prompts) * self.request.params.n


def read_json(raw: bytes) -> dict[str, Any]:
    """The object in a body. Raises ApiError."""
    try:
        return load_object(raw)
    except ValueError as error:
        message = str(error).replace("a line must be", "the body must be")
        raise ApiError(400, message, code="invalid_json") from error


def parse_call(
    body: Mapping[str, Any],
    url: str,
    defaults: Mapping[str, Any],
    model_names: Sequence[str],
    dialect: Dialect,
) -> Call:
    """Read the body of a completions or chat completions request. Raises ApiError, naming the field and the remedy.

    defaults: sampling fields, and `chat_template`, where the body does not say otherwise.
    """
    rest = dict(body)
    check_model(rest.get("model"), model_names)
    stream = _flag(rest, "stream")
    token_ids = _flag(rest, "return_token_ids")
    options = rest.pop("stream_options", None)
    if options is not None:
        options = _stream_options(options, stream)
    if "best_of" in rest and rest["best_of"] == (rest.get("n") or 1):
        del rest["best_of"]
    tools = _chat_fields(rest, dialect) if url == CHAT_URL else NO_TOOLS
    record = {"method": "POST", "url": url, "body": rest}
    request = parse_record(record, 1, defaults)
    if isinstance(request, LineError):
        raise refused(request, body)
    request = _with_tools(request, tools, dialect)
    options = options or {}
    return Call(
        request=request,
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        return_token_ids=token_ids,
        tools=tools,
        dialect=dialect,
    )


def _chat_fields(body: dict[str, Any], dialect: Dialect) -> Tools:
    """Take out of a chat's body what a batch line has not got: tools, and the effort of reasoning."""
    tools = take_tools(body)
    if tools.choice == "auto" and dialect.tools is None:
        message = (
            "no format of tool calls is known of this model's chat template; start the server with --tool-parser, or "
            'give tool_choice "required", "none" or a function'
        )
        raise ApiError(400, message, code="invalid_request", param="tools")
    if (constraint := tools.constraint()) is not None:
        if body.get("structured_outputs") or body.get("response_format", {"type": "text"}) != {
            "type": "text"
        }:
            message = "a forced tool call and response_format exclude each other; keep one"
            raise ApiError(400, message, code="invalid_request", param="tool_choice")
        body["structured_outputs"] = constraint
    if (effort := body.pop("reasoning_effort", None)) is not None:
        given = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = (
            {"reasoning_effort": effort, **given} if isinstance(given, dict) else given
        )
    return tools


def _with_tools(request: LineRequest, tools: Tools, dialect: Dialect) -> LineRequest:
    """The request whose prompt tells of the tools, and whose text shows the tags that parsers look for."""
    (prompt, *others) = request.prompts
    if not isinstance(prompt, Chat):
        return request
    params = request.params
    if dialect.needs_special_tokens and not tools.is_forced:
        params = replace(params, skip_special_tokens=False)
    if tools.tools:
        prompt = Chat(messages=prompt.messages, options={**prompt.options, "tools": list(tools.tools)})
    return replace(request, prompts=(prompt, *others), params=params)


def is_chat_url(url: str) -> bool:
    return url == CHAT_URL


def check_model(name: object, names: Sequence[str]) -> None:
    """Raise ApiError unless the name is one of the model's, or none."""
    if isinstance(name, str) and name not in names:
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; this server has {', '.join(names)}",
            code="model_not_found",
            param="model",
        )


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ApiError(
            400, f"{name} must be true or false, not {value!r}", code="invalid_request", param=name
        )
    return value


def _stream_options(options: object, stream: bool) -> dict[str, bool]:
    name = "stream_options"
    if not stream:
        raise ApiError(400, f"{name} needs stream: true", code="invalid_request", param=name)
    if not isinstance(options, dict):
        raise ApiError(400, f"{name} must be an object, not {options!r}", code="invalid_request", param=name)
    for key, value in options.items():
        if key == "include_obfuscation":
            continue  # padding against eavesdroppers, which changes nothing for the client
        if key not in STREAM_OPTIONS or not isinstance(value, bool | None):
            message = f"{name} may hold {' and '.join(STREAM_OPTIONS)}, true or false; not {key!r}: {value!r}"
            raise ApiError(400, message, code="invalid_request", param=name)
    return {key: bool(options.get(key)) for key in STREAM_OPTIONS}
