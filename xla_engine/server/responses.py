"""`/v1/responses`: OpenAI's Responses API for text and functions, on top of chats; and its stored responses."""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from xla_engine.openai.call import HttpCall
from xla_engine.openai.chunks import DONE
from xla_engine.openai.fields import CHAT_URL
from xla_engine.openai.response_items import FieldError, items_of, referenced
from xla_engine.openai.responses import ResponseBuilder, chat_body
from xla_engine.openai.results import AnswerWriter, response_writer
from xla_engine.server.bodies import LONG, parse_call, read_json
from xla_engine.server.errors import ApiError
from xla_engine.server.info import JsonResponse, limit_of
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import Service, Submission
from xla_engine.text.parsers.chats import Chat
from xla_engine.utils.shown import shown

MAX_LISTED = 100  # items in one answer
TENANT_BYTES = 16 << 20
TOTAL_BYTES = 64 << 20
_BYTES_OF_ID = 256  # of an item's id in memory, beside its characters
_INSTRUCTIONS = ("system", "developer")  # roles


class Responses:
    """The form of `/v1/responses`, and its stored responses."""

    end = DONE

    def __init__(self, service: Service) -> None:
        self._service = service
        self.memory = Memory()

    def size(self, raw: bytes, scope: Scope) -> int:
        """The bytes of the body, and those that its caller has stored if it may name a previous response or item."""
        if len(raw) > LONG:  # parsed by itself anyway, and the search would hold the loop
            return len(raw)
        names = (b"previous_response_id", b"item_reference", b'"id"', b"\\u")  # an escape may hide a name
        may_follow = any(name in raw for name in names)
        return len(raw) + (self.memory.held(scope["state"].get("tenant", "")) if may_follow else 0)

    def parse(self, raw: bytes, scope: Scope) -> HttpCall:
        """The call of a body. Raises ApiError."""
        try:
            return self._parsed(raw, scope)
        except FieldError as error:
            raise ApiError(400, str(error), code=error.code, param=error.param) from error

    def _parsed(self, raw: bytes, scope: Scope) -> HttpCall:
        service, body = self._service, read_json(raw)
        tenant, previous = scope["state"].get("tenant", ""), body.get("previous_response_id")
        items = self.memory.resolved(tenant, items_of(body.get("input")))
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
        # encoded here, because parsing has a thread of its own if there is much
        kept = [StoredItem.of(item) for item in items] if body.get("store") else []
        return replace(call, request=replace(call.request, response={**body, "input": kept}))

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None:
        """A call without this number of its oldest messages, if it has `truncation: "auto"`."""
        if (call.request.response or {}).get("truncation") != "auto":
            return None
        (chat,) = call.request.prompts
        assert isinstance(chat, Chat)
        messages = _without_oldest(chat.messages, without)
        if messages is None:
            return None
        return replace(call, request=replace(call.request, prompts=(replace(chat, messages=messages),)))

    def writer(self, call: HttpCall, name: str, submission: Submission) -> AnswerWriter[ResponseBuilder]:
        header, thinking = self._service.header(), submission.thinking
        return response_writer(call.request, name, header, thinking=thinking, pack=_packed)

    def ended(self, call: HttpCall, writer: AnswerWriter[ResponseBuilder], submission: Submission) -> None:
        """Keep a response that has ended, if requested."""
        body = call.request.response
        if body is not None and body.get("store"):
            output = [StoredItem.of(item) for item in writer.builder.output]
            self.memory.keep(submission.tenant, writer.builder.response, body["input"] + output)

    async def read(self, request: Request) -> Response:
        """`GET /v1/responses/ID`."""
        return Response(self.memory.kept(*_names(request))[0], media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/ID/input_items`: what it answers, newest first unless `order` is "asc"."""
        kept, limit = self.memory.kept(*_names(request)), limit_of(request, 20, most=MAX_LISTED)
        order, after = request.query_params.get("order"), request.query_params.get("after")

        def listed() -> bytes:
            response, items = map(msgspec.json.decode, kept)
            begun = items[: len(items) - len(response["output"])]
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


class StoredItem(NamedTuple):
    """An item of a conversation. name: its id. data: the item as JSON."""

    name: str
    data: msgspec.Raw

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> StoredItem:
        """The item under its id; one without gets a new one, by which a later request may refer to it."""
        if not isinstance(name := item.get("id"), str):
            kind = item.get("type") or "message"
            name = f"{'msg' if kind == 'message' else 'item'}_{secrets.token_hex(16)}"
            item = {**item, "type": kind, "id": name}
        return cls(name, _packed(item))


def _packed(entry: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(entry))


def _without_oldest(
    messages: Sequence[Mapping[str, Any]], number: int
) -> tuple[Mapping[str, Any], ...] | None:
    """Drop the oldest messages, except instructions, and the results of dropped tool calls.

    Returns None if no message is left.
    """
    first = next((at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    rest = list(messages[first + number :])
    while rest and rest[0]["role"] == "tool":
        del rest[0]
    return (*messages[:first], *rest) if rest else None


def _names(request: Request) -> tuple[str, str]:
    """The caller's tenant, and the response's id."""
    return tenant_of(request), request.path_params["id"]


class Memory:
    """The newest responses with `store: true`, as JSON. If full, the tenant with the most bytes loses its oldest
    ones."""

    def __init__(self, *, tenant_bytes: int = TENANT_BYTES, total_bytes: int = TOTAL_BYTES) -> None:
        """tenant_bytes, total_bytes: the most that one tenant and all have."""
        self._tenant_bytes, self._total_bytes = tenant_bytes, total_bytes
        self._kept: defaultdict[str, OrderedDict[str, tuple[bytes, bytes]]] = defaultdict(OrderedDict)
        self._held: defaultdict[str, int] = defaultdict(int)
        self._items: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)  # ids, by responses with them
        self._holders: defaultdict[str, dict[str, str]] = defaultdict(dict)  # the newest response, by ids

    def keep(self, tenant: str, response: dict[str, Any], items: Sequence[StoredItem]) -> None:
        """Store a response. items: its whole conversation and its output, for a response that follows it."""
        name: str = response["id"]
        data = msgspec.json.encode(response), msgspec.json.encode([item.data for item in items])
        self._kept[tenant][name] = data
        ids = self._items[tenant][name] = [item.name for item in items]
        self._holders[tenant].update(dict.fromkeys(ids, name))
        self._held[tenant] += _size(data, ids)
        while self._held.get(tenant, 0) > self._tenant_bytes:
            self._forget(tenant)
        while sum(self._held.values()) > self._total_bytes:
            self._forget(max(self._held, key=self._held.__getitem__))

    def held(self, tenant: str) -> int:
        """The bytes that a tenant's responses and their items have."""
        return self._held.get(tenant, 0)

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

    def resolved(self, tenant: str, items: list[Any]) -> list[Any]:
        """The items, with those of stored responses and of their inputs in place of references to them.

        Raises ApiError.
        """
        stored: dict[str, dict[str, Any]] = {}  # the items of the responses that were looked at, by their ids
        holders, found, names = self._holders.get(tenant, {}), list(items), set[str]()
        for number, item in enumerate(items):
            if (name := referenced(item)) is None:
                continue
            what = f"input[{number}] refers to the item {shown(name)}, which"
            if name in names:  # repeated, a large item would need memory without bounds
                raise ApiError(
                    400, f"{what} is in the input already; leave one out", code="invalid_value", param="input"
                )
            if name not in stored and (data := self.find(tenant, holders.get(name))) is not None:
                stored |= {each["id"]: each for each in msgspec.json.decode(data[1])}
            if name not in stored:
                message = f"{what} is not kept here; send the item itself"
                raise ApiError(400, message, code="item_not_found", param="input")
            found[number] = stored[name]
            names.add(name)
        return found

    def delete(self, tenant: str, name: str) -> None:
        """Raises ApiError as `kept` does."""
        self.kept(tenant, name)
        self._forget(tenant, name)

    def _forget(self, tenant: str, name: str | None = None) -> None:
        """Drop one response, or the tenant's oldest."""
        kept = self._kept[tenant]
        name = next(iter(kept)) if name is None else name
        data = kept.pop(name)
        ids, holders = self._items[tenant].pop(name), self._holders[tenant]
        self._held[tenant] -= _size(data, ids)
        for item in ids:
            if holders.get(item) == name:
                del holders[item]
        if not kept:
            del self._kept[tenant], self._held[tenant], self._items[tenant], self._holders[tenant]


def _size(data: tuple[bytes, bytes], ids: Sequence[str]) -> int:
    """The bytes that a stored response needs."""
    return sum(map(len, data)) + sum(_BYTES_OF_ID + len(each) for each in ids)
