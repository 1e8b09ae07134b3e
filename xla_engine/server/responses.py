"""`/v1/responses`: OpenAI's Responses API for text and functions, on top of chats; and its stored responses."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from xla_engine.batch.fields import CHAT_URL
from xla_engine.batch.responses import FieldError, MessageLogprobs, ResponseBuilder, chat_body, items_of
from xla_engine.batch.results import ReasoningTokens, output_error, response_usage
from xla_engine.outputs import RequestOutput
from xla_engine.server.answers import PAUSE, counted, noted
from xla_engine.server.bodies import Call, parse_call, read_json
from xla_engine.server.chunks import DONE
from xla_engine.server.errors import ApiError, ended
from xla_engine.server.generation import SSE_HEADERS, Generation, send_json, send_part
from xla_engine.server.info import JsonResponse, limit_of
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import Service, Submission
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.parsers.formats import Plain

TOO_LONG = "context_length_exceeded"  # error code of a prompt that does not fit
MAX_LISTED = 100  # items in one answer
TENANT_BYTES = 16 << 20
TOTAL_BYTES = 64 << 20


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

    async def read(self, request: Request) -> Response:
        """`GET /v1/responses/ID`."""
        return Response(self.memory.response(*_names(request)), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/ID/input_items`: what it answers, newest first unless `order` is "asc"."""
        kept, limit = self.memory.kept(*_names(request)), limit_of(request, 20, most=MAX_LISTED)
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
            data = rest[:limit]
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

    async def _answer(self, send: Send, call: Call, name: str, submission: Submission) -> None:
        (output,) = await self._whole(call, submission)
        writer = self._writer(call, name, submission)
        async for _ in self._service.turns.parts(PAUSE for _ in writer.events(output)):
            pass
        self._keep(writer)
        await send_json(send, 200, msgspec.json.encode(writer.builder.response))

    async def _stream(self, send: Send, call: Call, name: str, submission: Submission) -> None:
        turns, writer = self._service.turns, self._writer(call, name, submission)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for part in turns.parts(map(_event, writer.builder.begin())):
            await send_part(send, part)
        while not submission.finished:
            await submission.next_news()
            async for part in turns.parts(self._events(writer, submission.take())):
                await send_part(send, part)
        await send_part(send, DONE)
        await send_part(send, b"", last=True)

    def _writer(self, call: Call, name: str, submission: Submission) -> _Writer:
        assert isinstance(call, ResponseCall)
        return _Writer(call, name, self._service, thinking=submission.thinking)

    def _events(self, writer: _Writer, news: list[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        for _, output in news:
            for event in writer.events(output):
                yield PAUSE if event is None else _event(event)
        self._keep(writer)

    def _keep(self, writer: _Writer) -> None:
        if writer.ended and writer.call.body.get("store"):
            items = writer.call.items + writer.builder.output
            self.memory.keep(writer.call.tenant, writer.builder.response, items)


class _Writer:
    """Turns the outputs of one call into the events of its response. ended: whether it has a result."""

    def __init__(self, call: ResponseCall, name: str, service: Service, *, thinking: bool) -> None:
        request, tokenizer = call.request, service.engine.tokenizer
        self.call, self.ended = call, False
        self._tokenizer = tokenizer
        self._parser = call.parser(thinking=thinking) or Plain()
        self._reasoning = ReasoningTokens(request, tokenizer, thinking=thinking)
        self._logprobs = None
        if request.params.logprobs is not None and tokenizer is not None:
            text = tokenizer.incremental(request.params.skip_special_tokens)
            self._logprobs = MessageLogprobs(call.parser(thinking=thinking), text)
        self._new = 0  # generated tokens
        self.builder = ResponseBuilder(
            name,
            body=call.body,
            model=request.model or service.settings.model_names[0],
            created=int(time.time()),
            logprobs=self._logprobs,
        )

    def events(self, output: RequestOutput) -> Iterator[dict[str, Any] | None]:
        """The events of new output. None where the caller may give way to other work."""
        request, completion = self.call.request, output.outputs[0]
        self._new += len(completion.token_ids)
        events = self._parser.feed(completion.text)
        yield from (None for _ in counted(self._reasoning, completion.token_ids))
        if self._logprobs is not None:
            yield from (None for _ in noted(self._logprobs, completion, request.params, self._tokenizer))
        if (error := output_error(request, output)) is not None:
            failure = ended(error)
            yield self.builder.failed(failure.code, failure.message)
            return
        yield from self.builder.add([*events, *(self._parser.finish() if output.finished else ())])
        if output.finished:
            usage = response_usage(output, new=self._new, reasoning=self._reasoning.count)
            yield from self.builder.end(reason=completion.finish_reason, usage=usage, now=int(time.time()))
            self.ended = True


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
    return tenant_of(request), request.path_params["id"]


def _event(value: Mapping[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class Memory:
    """The newest responses with `store: true`, as JSON. If full, the tenant with the most bytes loses its oldest
    ones."""

    def __init__(self, tenant_bytes: int = TENANT_BYTES, total_bytes: int = TOTAL_BYTES) -> None:
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._kept: defaultdict[str, OrderedDict[str, tuple[bytes, bytes]]] = defaultdict(OrderedDict)
        self._held: defaultdict[str, int] = defaultdict(int)

    def keep(self, tenant: str, response: dict[str, Any], items: list[Any]) -> None:
        """Store a response. items: its whole conversation and its output, for a response that follows it."""
        data = msgspec.json.encode(response), msgspec.json.encode(items)
        self._kept[tenant][response["id"]] = data
        self._held[tenant] += sum(map(len, data))
        while self._held.get(tenant, 0) > self._tenant_bytes:
            self._forget(tenant)
        while sum(self._held.values()) > self._total_bytes:
            self._forget(max(self._held, key=self._held.__getitem__))

    def items(self, tenant: str, name: str) -> list[Any] | None:
        """The items of a response."""
        data = self._kept[tenant].get(name) if tenant in self._kept else None
        return None if data is None else list(msgspec.json.decode(data[1]))

    def response(self, tenant: str, name: str) -> bytes:
        """A response as JSON; the bytes are shared. Raises ApiError if it does not exist or is another tenant's."""
        return self.kept(tenant, name)[0]

    def kept(self, tenant: str, name: str) -> tuple[bytes, bytes]:
        """A response and its items as JSON. Raises ApiError as `response` does."""
        data = self._kept[tenant].get(name) if tenant in self._kept else None
        if data is None:
            message = (
                f"no response found with id {name[:100]!r}; store: true keeps responses for a limited time"
            )
            raise ApiError(404, message, code="not_found", param="id")
        return data

    def delete(self, tenant: str, name: str) -> None:
        """Raises ApiError as `response` does."""
        self.response(tenant, name)
        self._forget(tenant, name)

    def _forget(self, tenant: str, name: str | None = None) -> None:
        """Drop one response, or the tenant's oldest."""
        kept = self._kept[tenant]
        data = kept.popitem(last=False)[1] if name is None else kept.pop(name)
        self._held[tenant] -= sum(map(len, data))
        if not kept:
            del self._kept[tenant], self._held[tenant]
