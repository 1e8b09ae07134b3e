"""The endpoint of `/v1/responses`."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from xla_engine.batch.envelope import CHAT_URL
from xla_engine.batch.responses.body import FieldError, chat_body, items_of
from xla_engine.batch.responses.builder import ResponseBuilder
from xla_engine.batch.responses.logprobs import MessageLogprobs
from xla_engine.batch.results import output_error
from xla_engine.batch.usage import ReasoningTokens, Usage
from xla_engine.outputs import RequestOutput
from xla_engine.server.chunks import DONE
from xla_engine.server.columns import counted, noted
from xla_engine.server.errors import ApiError, ended
from xla_engine.server.generation import SSE_HEADERS, Generation, next_news, send_json, send_part
from xla_engine.server.info import JsonResponse
from xla_engine.server.responses.memory import Memory
from xla_engine.server.service import Service, Submission
from xla_engine.server.wire import Call, parse_call, read_json
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.parsers.formats import Plain
from xla_engine.text.parsers.scan import Parser

TOO_LONG = "context_length_exceeded"  # error code of a prompt that does not fit
MAX_LISTED = 100  # items in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall(Call):
    """A chat call whose answer is a response.

    body: as received. items: the whole conversation that it answers. tenant: the owner.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)
    tenant: str = ""


class Responses(Generation):
    """The chat endpoint with answers in the Responses format."""

    prefix = "resp_"

    def __init__(self, service: Service) -> None:
        super().__init__(service, CHAT_URL)
        self.memory = Memory()

    def _parse(self, raw: bytes, scope: Scope) -> Call:
        try:
            return self._parsed(raw, scope)
        except FieldError as error:
            raise ApiError(400, str(error), code=error.code, param=error.param) from error

    def _parsed(self, raw: bytes, scope: Scope) -> Call:
        service, body = self._service, read_json(raw)
        tenant, previous = scope["state"].get("tenant", ""), body.get("previous_response_id")
        items = items_of(body.get("input"))
        if previous is not None:
            found = self.memory.items(tenant, previous) if isinstance(previous, str) else None
            if found is None:
                message = (
                    f"previous_response_id {str(previous)[:100]!r} is not kept here; send its items as input"
                )
                code = "previous_response_not_found"
                raise ApiError(400, message, code=code, param="previous_response_id")
            items = found + items
        chat = chat_body({**body, "input": items})
        call = parse_call(chat, CHAT_URL, service.defaults(), service.model_names)
        fields = {name: getattr(call, name) for name in Call.__dataclass_fields__}
        return ResponseCall(**fields, body=body, items=items, tenant=tenant)

    async def _submit(self, scope: Scope, call: Call, name: str) -> Submission:
        """Queue the call. With `truncation: "auto"`, drop its oldest messages if it does not fit."""
        assert isinstance(call, ResponseCall)
        without, shorter = 0, call.request
        while True:
            try:
                return await super()._submit(scope, replace(call, request=shorter), name)
            except ApiError as error:
                (chat,) = call.request.prompts
                assert isinstance(chat, Chat)
                without = 2 * without + 1
                messages = _without_oldest(chat.messages, without)
                if error.code != TOO_LONG or call.body.get("truncation") != "auto" or messages is None:
                    raise
                shorter = replace(call.request, prompts=(replace(chat, messages=messages),))

    def _keep(self, call: Call, builder: ResponseBuilder) -> None:
        assert isinstance(call, ResponseCall)
        if call.body.get("store"):
            self.memory.keep(call.tenant, builder.response, call.items + builder.output)

    async def read(self, request: Request) -> Response:
        """`GET /v1/responses/ID`."""
        return Response(self.memory.response(*_names(request)), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/ID/input_items`: what it answers, newest first unless `order` is "asc"."""
        kept, limit = self.memory.kept(*_names(request)), request.query_params.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LISTED):
            message = f"limit must be from 1 to {MAX_LISTED}"
            raise ApiError(400, message, code="invalid_request", param="limit")
        order, after = request.query_params.get("order"), request.query_params.get("after")

        def listed() -> bytes:
            response, items = map(msgspec.json.decode, kept)
            begun = [
                {"type": "message", "id": f"item_{number}", **item}
                for number, item in enumerate(items[: len(items) - len(response["output"])])
            ]
            rest = begun if order == "asc" else begun[::-1]
            names = [item["id"] for item in rest]
            rest = rest[names.index(after) + 1 :] if after in names else rest
            data = rest[: int(limit)]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            more = len(rest) > len(data)
            return msgspec.json.encode({"object": "list", "data": data, **ends, "has_more": more})

        size = sum(map(len, kept))
        return Response(await self._service.bodies.parsed(listed, size), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/ID`."""
        tenant, name = _names(request)
        self.memory.delete(tenant, name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    def _builder(self, call: Call, name: str, logprobs: MessageLogprobs | None) -> ResponseBuilder:
        assert isinstance(call, ResponseCall)
        model = call.request.model or self._service.settings.model_names[0]
        now = int(time.time())
        return ResponseBuilder(name, body=call.body, model=model, created=now, logprobs=logprobs)

    def _logprobs(self, call: Call, submission: Submission) -> MessageLogprobs | None:
        tokenizer = self._service.engine.tokenizer
        if call.request.params.logprobs is None or tokenizer is None:
            return None
        return MessageLogprobs(call.request, tokenizer, thinking=submission.thinking)

    async def _answer(
        self, send: Send, call: Call, name: str, submission: Submission, gone: asyncio.Task[None]
    ) -> None:
        (output,) = await self._whole(call, submission, gone)
        logprobs, completion = self._logprobs(call, submission), output.outputs[0]
        builder = self._builder(call, name, logprobs)
        parser = call.parser(thinking=submission.thinking) or Plain()
        tokenizer = self._service.engine.tokenizer
        counter = ReasoningTokens(call.request, tokenizer, thinking=submission.thinking)
        async for _ in self._service.turns.parts(counted(counter, completion.token_ids)):
            pass
        if logprobs is not None:
            reading = noted(logprobs, completion, call.request.params, tokenizer)
            async for _ in self._service.turns.parts(reading):
                pass
        usage = Usage.of([output], new=len(completion.token_ids), reasoning=counter.count).as_response()
        builder.whole(parser, completion, usage=usage, now=int(time.time()))
        self._keep(call, builder)
        await send_json(send, 200, msgspec.json.encode(builder.response))

    async def _stream(
        self, send: Send, call: Call, name: str, submission: Submission, gone: asyncio.Task[None]
    ) -> None:
        turns = self._service.turns
        logprobs = self._logprobs(call, submission)
        builder = self._builder(call, name, logprobs)
        parser = call.parser(thinking=submission.thinking) or Plain()
        tokens, tokenizer = 0, self._service.engine.tokenizer
        counter = ReasoningTokens(call.request, tokenizer, thinking=submission.thinking)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for part in turns.parts(map(_event, builder.begin())):
            await send_part(send, part)
        while not submission.finished:
            await next_news(submission, gone)
            news = [output for _, output in submission.take()]
            tokens += sum(len(output.outputs[0].token_ids) for output in news)
            told = self._events(call, builder, parser, news, tokens, counter, logprobs)
            async for part in turns.parts(told):
                await send_part(send, part)
        await send_part(send, DONE)
        await send_part(send, b"", last=True)

    def _events(
        self,
        call: Call,
        builder: ResponseBuilder,
        parser: Parser,
        news: list[RequestOutput],
        tokens: int,
        counter: ReasoningTokens,
        logprobs: MessageLogprobs | None,
    ) -> Iterator[bytes]:
        """The events of new outputs. tokens: of the answer, including the new ones."""
        for output in news:
            completion = output.outputs[0]
            events = parser.feed(completion.text)
            yield from counted(counter, completion.token_ids)
            if logprobs is not None:
                yield from noted(logprobs, completion, call.request.params, self._service.engine.tokenizer)
            if (error := output_error(call.request, output)) is not None:
                failure = ended(error)
                yield _event(builder.failed(failure.code, failure.message))
                return
            if output.finished:
                events += parser.finish()
            yield from map(_event, builder.add(events))
            if output.finished:
                usage = Usage.of([output], new=tokens, reasoning=counter.count).as_response()
                end = builder.end(reason=completion.finish_reason, usage=usage, now=int(time.time()))
                yield from map(_event, end)
                self._keep(call, builder)


def _without_oldest(
    messages: Sequence[Mapping[str, Any]], number: int
) -> tuple[Mapping[str, Any], ...] | None:
    """Drop the oldest messages, except instructions, and the results of dropped tool calls.

    Returns None if no message is left.
    """
    first = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    rest = list(messages[first + number :])
    while rest and rest[0]["role"] == "tool":
        del rest[0]
    return (*messages[:first], *rest) if rest else None


def _names(request: Request) -> tuple[str, str]:
    """The caller's tenant, and the response's id."""
    return request.scope["state"].get("tenant", ""), request.path_params["id"]


def _event(value: Mapping[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
