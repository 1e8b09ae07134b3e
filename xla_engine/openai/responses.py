"""OpenAI's Responses API on top of chats: turn a request's body into that of a chat with the same bits, and the answer
into a response."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.openai.response_items import FieldError, messages_of
from xla_engine.text.parsers.scan import Content, Event, Parser, Reasoning, ToolArguments, ToolStart
from xla_engine.utils.json_line import kind
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import IncrementalDetokenizer

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
# of items that are calls: the field of what the model wrote, and the name of its events
_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
# Defaults of a tool's fields in an answer.
_TOOL = {"description": None, "parameters": None, "strict": None}
_USAGE = (  # names of a chat, and of a response
    ("prompt_tokens", "input_tokens"),
    ("prompt_tokens_details", "input_tokens_details"),
    ("completion_tokens", "output_tokens"),
    ("completion_tokens_details", "output_tokens_details"),
    ("total_tokens", "total_tokens"),
)
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "metadata")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the equivalent chat. `input` must hold the whole conversation. Raises FieldError."""
    rest = {name: value for name, value in body.items() if name not in ("store", "previous_response_id")}
    if not isinstance(body.get("store"), bool | None):
        raise FieldError("store", f"must be true or false, not {shown(body['store'])}")
    for name, allowed in _NEUTRAL.items():
        value = rest.pop(name, None)
        if not any(value is each or (value == each and type(value) is type(each)) for each in allowed):
            raise FieldError(name, f"is not supported by this path; leave it out, not {shown(value)}")
    include = rest.pop("include", None) or []
    if not isinstance(include, list):
        raise FieldError("include", f"must be a list, not {kind(include)}")
    for name in include:
        if name not in (LOGPROBS, *_NOTHING_TO_INCLUDE):
            raise FieldError("include", f"has {shown(name)}, which this path does not support; leave it out")
    given = rest.pop("top_logprobs", None)
    top = None if given is None else integer_of(given)
    if given is not None and (top is None or not 0 <= top <= MAX_LOGPROBS):
        raise FieldError("top_logprobs", f"must be from 0 to {MAX_LOGPROBS}, not {shown(given)}")
    messages = []
    if (instructions := rest.pop("instructions", None)) is not None:
        if not isinstance(instructions, str):
            raise FieldError("instructions", "must be text")
        messages.append({"role": "system", "content": instructions})
    messages += messages_of(rest.pop("input", None))
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
        raise FieldError("stream_options", f"must be empty here, not {shown(options)}")
    text, reasoning = rest.pop("text", None) or {}, rest.pop("reasoning", None) or {}
    if not isinstance(text, Mapping) or not isinstance(reasoning, Mapping):
        raise FieldError("text", "and reasoning must be objects")
    _check_names("text", text, ("format", "verbosity"))
    _check_names("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    for name, value in reasoning.items():
        if not isinstance(value, str | None):
            raise FieldError(f"reasoning.{name}", f"must be a string, not {kind(value)}")
    if (form := text.get("format")) is not None:
        chat["response_format"] = _format(form)
    if (effort := reasoning.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if (verbosity := text.get("verbosity")) is not None:
        chat["verbosity"] = verbosity
    return {**rest, **chat}  # remaining fields are a chat's, or are rejected later by name


def _tools(tools: object) -> list[dict[str, Any]]:
    """The tools of a chat, which leaves out those that it does not have."""
    if not isinstance(tools, list):
        raise FieldError("tools", "must be a list of functions")
    found = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise FieldError("tools", f"[{number}] must be an object")
        kind = tool.get("type")
        rest = {key: value for key, value in tool.items() if key != "type" and value is not None}
        found.append({"type": kind, str(kind): rest} if kind in ("function", "custom") else dict(tool))
    return found


def _format(form: object) -> dict[str, Any]:
    if not isinstance(form, Mapping):
        raise FieldError("text", "format must be an object")
    if form.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {key: form[key] for key in ("name", "schema") if key in form},
        }
    return dict(form)


def _check_names(param: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise FieldError(f"{param}.{name[:100]}", f"is not known; {param} may hold {' and '.join(known)}")


class MessageLogprobs:
    """Finds the message of each token by reading the text a second time, token by token.

    Tokens of reasoning, calls and tags are in no message. A token without text belongs to what follows it, and at the
    end of the text to what is before it.
    """

    def __init__(self, parser: Parser, text: IncrementalDetokenizer) -> None:
        """parser, text: as for the answer, for a second reading of it."""
        self._parser = parser
        self._text = text
        self._untold: list[tuple[str, Any]] = []  # text and entry of tokens since the last event
        self._messages: list[list[Any]] = []
        self._in_message = False

    def add(self, token_ids: Sequence[int], entries: Iterable[Any]) -> None:
        """Read more tokens. entries: the log-probabilities of each."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text.push(token_id)
            self._untold.append((text, entry))
            self._read(self._parser.feed(text))

    def finish(self) -> None:
        """The text has ended."""
        self._read(self._parser.finish())
        if self._in_message:
            self._messages[-1] += [entry for text, entry in self._untold if not text]
        self._untold = []

    def take(self, message: int) -> list[Any]:
        """The entries of the message of this number that were not taken before."""
        if message >= len(self._messages):
            return []
        found, self._messages[message] = self._messages[message], []
        return found

    def _read(self, events: Iterable[Event]) -> None:
        told, tokens = False, self._untold
        for event in events:
            told, begins = True, not self._in_message
            self._in_message = isinstance(event, Content)
            if isinstance(event, Content):
                if begins:
                    self._messages.append([])
                self._messages[-1] += _last(tokens, len(event.text))
                tokens = []
        if told:
            self._untold = []


def _last(tokens: Sequence[tuple[str, Any]], characters: int) -> list[Any]:
    """The entries of the last tokens whose texts have this many characters, and of those without text before them."""
    begin = len(tokens)
    while begin and (characters > 0 or not tokens[begin - 1][0]):
        begin -= 1
        characters -= len(tokens[begin][0])
    return [entry for _, entry in tokens[begin:]]


class ResponseBuilder:
    """Builds one response. Streamed and unstreamed answers take the same steps."""

    def __init__(
        self,
        name: str,
        *,
        body: Mapping[str, Any],
        model: str,
        created: int,
        logprobs: MessageLogprobs | None = None,
        custom: Container[str] = (),
    ) -> None:
        """logprobs: the log-probabilities of tokens, if requested; it has read those whose text is added. custom: the
        names of custom tools."""
        self._custom = custom
        self._logprobs = logprobs
        self.output: list[dict[str, Any]] = []
        self._name = name
        self._number = -1
        self._open: dict[str, Any] | None = None
        self._response: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": body.get("store") is True,
            "service_tier": "default",
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [
                (_TOOL if tool.get("type") == "function" else {}) | tool for tool in body.get("tools") or []
            ],
            "truncation": body.get("truncation") or "disabled",
            "usage": None,
            **{key: body.get(key) for key in _ECHOED},
            "metadata": body.get("metadata") or {},
            "temperature": body.get("temperature") if body.get("temperature") is not None else 1.0,
            "top_p": body.get("top_p") if body.get("top_p") is not None else 1.0,
            "presence_penalty": body.get("presence_penalty") or 0.0,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "top_logprobs": body.get("top_logprobs") or 0,
            "max_tool_calls": None,
            "safety_identifier": body.get("safety_identifier"),
            "prompt_cache_key": body.get("prompt_cache_key"),
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events."""
        yield self._event("response.created", response=dict(self._response))
        yield self._event("response.in_progress", response=dict(self._response))

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """The events for more text."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._item("message")
                    yield from self._delta("response.output_text.delta", text)
                case Reasoning(text):
                    yield from self._item("reasoning")
                    yield from self._delta("response.reasoning_text.delta", text)
                case ToolStart(name):
                    yield from self._close()
                    kind = "custom_tool_call" if name in self._custom else "function_call"
                    yield from self._item(kind, name=name)
                case ToolArguments(text):
                    assert self._open is not None
                    place, event_name = _CALLS[self._open["type"]]
                    self._open[place] += text
                    yield self._at(f"response.{event_name}.delta", delta=text)

    def end(self, *, reason: str | None, usage: dict[str, Any], now: int) -> Iterator[dict[str, Any]]:
        """The last events. reason: "stop" or "length". usage: as in `completion_usage`."""
        cut = reason == "length"
        if not self.output:
            yield from self._item("message")
        yield from self._close(cut=cut)
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else now,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output,
            "usage": {theirs: usage.get(ours) for ours, theirs in _USAGE},
        }
        yield self._event("response.incomplete" if cut else "response.completed", response=self.response)

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """The last event of a response that fails."""
        error = {"code": code, "message": message}
        self._response |= {"status": "failed", "error": error, "output": self.output}
        return self._event("response.failed", response=self.response)

    @property
    def response(self) -> dict[str, Any]:
        """The response so far."""
        return dict(self._response)

    def _item(self, kind: str, *, name: str = "") -> Iterator[dict[str, Any]]:
        """Open an item of this kind unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        token = blake2b(f"{self._name}/{len(self.output)}".encode(), digest_size=16).hexdigest()
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        match kind:
            case "message":
                item |= {"id": f"msg_{token}", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"id": f"rs_{token}", "summary": [], "content": []}
            case _:
                prefix = "fc" if kind == "function_call" else "ctc"
                item |= {"id": f"{prefix}_{token}", "call_id": f"call_{token[:24]}", "name": name}
                item[_CALLS[kind][0]] = ""
        self._open = item
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=_copied(item))
        if kind not in _CALLS:
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._parts.append(part)
            yield self._at("response.content_part.added", content_index=0, part=_copied(part))

    def _delta(self, event: str, text: str) -> Iterator[dict[str, Any]]:
        self._parts[0]["text"] += text
        extra = {}
        if event == "response.output_text.delta":
            extra["logprobs"] = self._new_logprobs()
        yield self._at(event, content_index=0, delta=text, **extra)

    def _new_logprobs(self) -> list[Any]:
        """Those of the open message that nothing has told yet."""
        if self._logprobs is None:
            return []
        found = self._logprobs.take(sum(item["type"] == "message" for item in self.output) - 1)
        self._parts[0]["logprobs"] += found
        return found

    def _close(self, *, cut: bool = False) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        if item["type"] in _CALLS:
            place, event_name = _CALLS[item["type"]]
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._at(f"response.{event_name}.done", **{place: item[place]}, **named)
        else:
            part = self._parts[0]
            word = "output_text" if item["type"] == "message" else "reasoning_text"
            if item["type"] == "message" and (late := self._new_logprobs()):  # of tokens without text
                yield self._at("response.output_text.delta", content_index=0, delta="", logprobs=late)
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._at(f"response.{word}.done", content_index=0, text=part["text"], **extra)
            yield self._at("response.content_part.done", content_index=0, part=dict(part))
        item["status"] = "incomplete" if cut else "completed"
        self._open = None
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=_copied(item))

    @property
    def _parts(self) -> list[dict[str, Any]]:
        assert self._open is not None
        parts: list[dict[str, Any]] = self._open["content"]
        return parts

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an item that later changes do not affect."""
    return {
        key: [dict(part) if isinstance(part, dict) else part for part in value]
        if isinstance(value, list)
        else value
        for key, value in item.items()
    }
