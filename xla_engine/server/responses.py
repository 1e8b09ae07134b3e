"""`/v1/responses`: OpenAI's Responses API for text and functions, on top of chats; and its stored responses."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from xla_engine.batch.fields import CHAT_URL
from xla_engine.batch.responses import FieldError, chat_body, items_of
from xla_engine.batch.results import ResponseWriter, output_error
from xla_engine.server.answers import PAUSE
from xla_engine.server.bodies import Call, parse_call, read_json
from xla_engine.server.chunks import DONE
from xla_engine.server.errors import ApiError, ended
from xla_engine.server.generation import SSE_HEADERS, Generation, send_json, send_part
from xla_engine.server.info import JsonResponse, limit_of
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import Service, Submission
from xla_engine.text.parsers.chats import Chat

TOO_LONG = "context_length_exceeded"  # error code of a prompt that does not fit
MAX_LISTED = 100  # items in one answer
TENANT_BYTES = 16 << 20
TOTAL_BYTES = 64 << 20


class Responses(Generation):
    """The chat endpoint with answers in the Responses format."""

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
            if (found := self.memory.find(tenant, previous)) is None:
                message = (
                    f"previous_response_id {str(previous)[:100]!r} is not kept here; send its items as input"
                )
                code = "previous_response_not_found"
                raise ApiError(400, message, code=code, param="previous_response_id")
            items = msgspec.json.decode(found[1]) + items
        chat = chat_body({**body, "input": items})
        call = parse_call(chat, CHAT_URL, service.defaults(), service.model_names)
        return replace(call, request=replace(call.request, response={**body, "input": items}))

    async def _submit(self, scope: Scope, call: Call, name: str) -> Submission:
        """Queue the call. With `truncation: "auto"`, drop its oldest messages if it does not fit."""
        truncates = (call.request.response or {}).get("truncation") == "auto"
        without, shorter = 0, call.request
        while True:
            try:
                return await super()._submit(scope, replace(call, request=shorter), name)
            except ApiError as error:
                (chat,) = call.request.prompts
                assert isinstance(chat, Chat)
                without = 2 * without + 1
                messages = _without_oldest(chat.messages, without)
                if error.code != TOO_LONG or not truncates or messages is None:
                    raise
                shorter = replace(call.request, prompts=(replace(chat, messages=messages),))

    async def read(self, request: Request) -> Response:
        """`GET /v1/responses/ID`."""
        return Response(self.memory.kept(*_names(request))[0], media_type="application/json")

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
        async for _ in self._service.turns.parts(PAUSE for _ in writer.events(output, int(time.time()))):
            pass
        self._keep(call, writer, submission)
        await send_json(send, 200, msgspec.json.encode(writer.builder.response))

    async def _stream(self, send: Send, call: Call, name: str, submission: Submission) -> None:
        turns, writer = self._service.turns, self._writer(call, name, submission)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for part in turns.parts(map(_event, writer.builder.begin())):
            await send_part(send, part)
        while not submission.finished:
            await submission.next_news()
            async for part in turns.parts(self._events(call, writer, submission)):
                await send_part(send, part)
        await send_part(send, DONE)
        await send_part(send, b"", last=True)

    def _writer(self, call: Call, name: str, submission: Submission) -> ResponseWriter:
        header, thinking = self._service.header(), submission.thinking
        return ResponseWriter(call.request, name, header, thinking=thinking, pack=_packed)

    def _events(self, call: Call, writer: ResponseWriter, submission: Submission) -> Iterator[bytes]:
        """The events of new output, up to a failure. The response is kept before its last event is sent."""
        for _, output in submission.take():
            if (error := output_error(call.request, output)) is not None:
                failure = ended(error)
                yield _event(writer.builder.failed(failure.code, failure.message))
                return
            for event in writer.events(output, int(time.time())):
                yield PAUSE if event is None else _event(event)
        self._keep(call, writer, submission)

    def _keep(self, call: Call, writer: ResponseWriter, submission: Submission) -> None:
        """Keep a response that has ended, if requested."""
        body = call.request.response
        if writer.ended and body is not None and body.get("store"):
            items = body["input"] + writer.builder.output
            self.memory.keep(submission.tenant, writer.builder.response, items)


def _packed(entry: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))


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

    def __init__(self) -> None:
        self._kept: defaultdict[str, OrderedDict[str, tuple[bytes, bytes]]] = defaultdict(OrderedDict)
        self._held: defaultdict[str, int] = defaultdict(int)

    def keep(self, tenant: str, response: dict[str, Any], items: list[Any]) -> None:
        """Store a response. items: its whole conversation and its output, for a response that follows it."""
        data = msgspec.json.encode(response), msgspec.json.encode(items)
        self._kept[tenant][response["id"]] = data
        self._held[tenant] += sum(map(len, data))
        while self._held.get(tenant, 0) > TENANT_BYTES:
            self._forget(tenant)
        while sum(self._held.values()) > TOTAL_BYTES:
            self._forget(max(self._held, key=self._held.__getitem__))

    def find(self, tenant: str, name: object) -> tuple[bytes, bytes] | None:
        """A response and its items as JSON; the bytes are shared. None if it does not exist or is another tenant's."""
        return self._kept[tenant].get(str(name)) if tenant in self._kept else None

    def kept(self, tenant: str, name: str) -> tuple[bytes, bytes]:
        """What `find` finds. Raises ApiError for None."""
        if (data := self.find(tenant, name)) is None:
            message = (
                f"no response found with id {name[:100]!r}; store: true keeps responses for a limited time"
            )
            raise ApiError(404, message, code="not_found", param="id")
        return data

    def delete(self, tenant: str, name: str) -> None:
        """Raises ApiError as `kept` does."""
        self.kept(tenant, name)
        self._forget(tenant, name)

    def _forget(self, tenant: str, name: str | None = None) -> None:
        """Drop one response, or the tenant's oldest."""
        kept = self._kept[tenant]
        data = kept.popitem(last=False)[1] if name is None else kept.pop(name)
        self._held[tenant] -= sum(map(len, data))
        if not kept:
            del self._kept[tenant], self._held[tenant]
