"""Endpoints whose answers consist of events, such as `/v1/responses`: a chat whose text is told in another form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from starlette.types import Scope, Send

from xla_engine.openai.answers import PAUSE
from xla_engine.openai.call import HttpCall
from xla_engine.openai.fields import CHAT_URL
from xla_engine.openai.results import AnswerWriter, Builder, output_error
from xla_engine.server.errors import ApiError, ended
from xla_engine.server.generation import SSE_HEADERS, Generation, send_json, send_part
from xla_engine.server.service import Service, Submission

TOO_LONG = "context_length_exceeded"  # error code of a prompt that does not fit


class Told(Builder, Protocol):
    """A builder whose answer can be streamed."""

    @property
    def response(self) -> dict[str, Any]:
        """The answer so far."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """The last event of an answer that fails."""


class Form(Protocol):
    """A form of requests and answers. end: what ends a stream."""

    end: bytes

    def parse(self, raw: bytes, scope: Scope) -> HttpCall:
        """The call of a body. Raises ApiError."""

    def size(self, raw: bytes, scope: Scope) -> int:
        """How many bytes `parse` reads, at most."""

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None:
        """A call without this number of its oldest messages; None if there is none."""

    def writer(self, call: HttpCall, name: str, submission: Submission) -> AnswerWriter[Any]:
        """The writer of an answer, whose builder is a `Told`."""

    def ended(self, call: HttpCall, writer: AnswerWriter[Any], submission: Submission) -> None:
        """Called with each answer that has a result, before its last event is sent."""


class Written(Generation):
    """The chat endpoint with requests and answers of another form."""

    def __init__(self, service: Service, form: Form) -> None:
        super().__init__(service, CHAT_URL)
        self._form = form

    def _size(self, raw: bytes, scope: Scope) -> int:
        return self._form.size(raw, scope)

    def _parse(self, raw: bytes, scope: Scope) -> HttpCall:
        return self._form.parse(raw, scope)

    async def _submit(self, scope: Scope, call: HttpCall, name: str) -> Submission:
        """Queue the call, or a shorter one if it does not fit."""
        without, shorter = 0, call
        while True:
            try:
                return await super()._submit(scope, shorter, name)
            except ApiError as error:
                without = 2 * without + 1
                found = self._form.shorter(call, without) if error.code == TOO_LONG else None
                if found is None:
                    raise
                shorter = replace(call, request=found.request)

    async def _answer(self, send: Send, call: HttpCall, name: str, submission: Submission) -> None:
        (output,) = await self._whole(call, submission)
        writer = self._form.writer(call, name, submission)
        async for _ in self._service.turns.parts(PAUSE for _ in writer.events(output, int(time.time()))):
            pass
        self._form.ended(call, writer, submission)
        await send_json(send, 200, msgspec.json.encode(writer.builder.response))

    async def _stream(self, send: Send, call: HttpCall, name: str, submission: Submission) -> None:
        turns, writer = self._service.turns, self._form.writer(call, name, submission)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for part in turns.parts(map(_event, writer.builder.begin())):
            await send_part(send, part)
        while not submission.finished:
            await submission.next_news()
            async for part in turns.parts(self._events(call, writer, submission)):
                await send_part(send, part)
        await send_part(send, self._form.end)
        await send_part(send, b"", last=True)

    def _events(self, call: HttpCall, writer: AnswerWriter[Any], submission: Submission) -> Iterator[bytes]:
        """The events of new output, up to a failure."""
        for _, output in submission.take():
            if (error := output_error(call.request, output)) is not None:
                failure = ended(error)
                yield _event(writer.builder.failed(failure.code, failure.message))
                return
            for event in writer.events(output, int(time.time())):
                yield PAUSE if event is None else _event(event)
        if writer.ended:
            self._form.ended(call, writer, submission)


def _event(value: Mapping[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
