"""`/v1/messages`: Anthropic's Messages API, on top of chats, and its count of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from xla_engine.errors import XlaEngineError
from xla_engine.openai.call import HttpCall
from xla_engine.openai.fields import CHAT_URL
from xla_engine.openai.results import AnswerWriter
from xla_engine.prompts import TextPair, prompt_parts
from xla_engine.server.bodies import parse_call, read_json
from xla_engine.server.errors import api_error, in_other_form
from xla_engine.server.info import JsonResponse
from xla_engine.server.messages_body import chat_of
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import Service, Submission
from xla_engine.text.conversation import ARGUMENTS
from xla_engine.text.fill_in import FillIn
from xla_engine.text.parsers.scan import Content, Event, Reasoning, ToolArguments, ToolStart

_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_TEXTS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}  # fields of deltas


class Messages:
    """The form of `/v1/messages`."""

    end = b""

    def __init__(self, service: Service) -> None:
        self._service = service

    def size(self, raw: bytes, scope: Scope) -> int:
        return len(raw)

    def parse(self, raw: bytes, scope: Scope) -> HttpCall:
        """The call of a body. Raises ApiError."""
        service = self._service
        return parse_call(chat_of(read_json(raw)), CHAT_URL, service.defaults(), service.model_names)

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None:
        return None

    def writer(self, call: HttpCall, name: str, submission: Submission) -> AnswerWriter[MessageBuilder]:
        header = self._service.header()
        model = call.request.model or header.model
        build = partial(MessageBuilder, name.replace("chatcmpl-", "msg_"), model)
        return AnswerWriter(call.request, header, build, thinking=submission.thinking)

    def ended(self, call: HttpCall, writer: AnswerWriter[MessageBuilder], submission: Submission) -> None:
        pass

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: the prompt's tokens, with those of pictures."""
        service, key = self._service, tenant_of(request)
        async with service.bodies.whole(request.scope, request.receive) as raw:
            call = await service.bodies.parsed(lambda: self.parse(raw, request.scope), len(raw))
        (prompt,) = call.request.prompts
        try:
            parts = prompt_parts(await service.ready_prompt(prompt, key=key, long=0))
        except XlaEngineError as error:
            raise api_error(error) from error
        content, tokenizer = parts.content, service.engine.tokenizer
        if isinstance(content, str) and tokenizer is not None:
            content = tokenizer.encode(content, add_special_tokens=False)
        assert not isinstance(content, str | TextPair | FillIn)
        return JsonResponse({"input_tokens": len(content)})


class MessageBuilder:
    """Builds one message. Streamed and unstreamed answers take the same steps."""

    def __init__(self, name: str, model: str, writer: AnswerWriter[MessageBuilder]) -> None:
        """name: the message's id. writer: of the answer, which counts its tokens."""
        self._name, self._writer = name, writer
        self._open: dict[str, Any] | None = None
        self._arguments = ""  # of the open call
        self._message: dict[str, Any] = {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._begun = False

    @property
    def response(self) -> dict[str, Any]:
        """The message so far."""
        return {**self._message, "usage": self._usage()}

    def begin(self) -> Iterator[dict[str, Any]]:
        """Nothing: the first event tells the tokens of the prompt, which are known with the first output."""
        return iter(())

    def add(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """The events for more text."""
        yield from self._start()
        for event in events:
            match event:
                case Content(text):
                    yield from self._delta("text", text)
                case Reasoning(text):
                    yield from self._delta("thinking", text)
                case ToolStart(name):
                    yield from self._close()
                    token = blake2b(f"{self._name}/{len(self._content)}".encode(), digest_size=12).hexdigest()
                    yield from self._block(
                        {"type": "tool_use", "id": f"toolu_{token}", "name": name, "input": {}}
                    )
                case ToolArguments(text):
                    self._arguments += text
                    yield self._at("content_block_delta", delta=_delta("tool_use", text))

    def end(self, *, reason: str | None, usage: Mapping[str, Any], now: int) -> Iterator[dict[str, Any]]:
        """The last events. reason: "stop" or "length"."""
        yield from self._start()
        if not self._content:
            yield from self._block({"type": "text", "text": ""})
        called = any(block["type"] == "tool_use" for block in self._content)
        yield from self._close()
        stop = self._writer.stop_reason
        told = "max_tokens" if reason == "length" else "tool_use" if called else "end_turn"
        if isinstance(stop, str) and told == "end_turn":
            told = "stop_sequence"
        ended = {"stop_reason": told, "stop_sequence": stop if told == "stop_sequence" else None}
        self._message |= ended
        yield {"type": "message_delta", "delta": ended, "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """The last event of a message that fails."""
        return in_other_form(500, message)

    @property
    def _content(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = self._message["content"]
        return content

    def _usage(self) -> dict[str, Any]:
        """As at Anthropic, tokens of the prompt that were cached are not among its input tokens."""
        usage = self._writer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _start(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": {**self.response, "content": []}}

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """More text of a block, which begins unless it is open."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._block(
                {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        assert self._open is not None
        self._open[kind] += text
        yield self._at("content_block_delta", delta=_delta(kind, text))

    def _block(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open, self._arguments = block, ""
        self._content.append(block)
        yield self._at("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            self._open["input"] = _input(self._arguments)
        yield self._at("content_block_stop")
        self._open = None

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._content) - 1, **fields}


def _delta(kind: str, text: str) -> dict[str, Any]:
    return {"type": _DELTAS[kind], _TEXTS[kind]: text}


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call, which is an object here: a text that is none, as after a cut, is its one value."""
    if not arguments:
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {ARGUMENTS: found}
