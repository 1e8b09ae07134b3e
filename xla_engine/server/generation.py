"""The endpoints that answer a POST with what a model generates, streamed and unstreamed, in any form."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from xla_engine.openai.call import HttpCall
from xla_engine.openai.results import answer_prefix, asked_for, output_error
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.server.errors import ApiError, ClientGone, api_error, ended, invalid
from xla_engine.server.service import Service, Submission
from xla_engine.server.turns import Turns

TIMEOUT_HEADER = b"x-request-timeout-ms"
LEFT_HEADER = b"x-left-to-client"
MAX_LEFT = 1000  # characters of it
TOO_LONG = "context_length_exceeded"  # error code of a prompt that does not fit
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Stream(Protocol):
    """Writes the events of one streamed answer. Its iterators may yield empty pieces, between which others work."""

    def begin(self) -> Iterator[bytes]:
        """The events before the first token."""

    def events(self, news: Sequence[tuple[int, RequestOutput]], *, whole: bool) -> Iterator[bytes]:
        """The events of new outputs by prompt, up to a failure, which ends the stream. whole: they are the last."""


class Form(Protocol):
    """The form of requests and answers at one path."""

    def parse(self, raw: bytes, scope: Scope) -> HttpCall:
        """The call of a body. Raises ApiError."""

    def size(self, raw: bytes, scope: Scope) -> int:
        """How many bytes `parse` reads, at most."""

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None:
        """A call without this number of its oldest messages; None if there is none."""

    def answer(
        self, call: HttpCall, outputs: Sequence[RequestOutput], name: str, submission: Submission
    ) -> Iterator[bytes]:
        """The JSON of a whole answer in pieces, perhaps empty, between which others work."""

    def stream(self, call: HttpCall, name: str, submission: Submission) -> Stream:
        """What writes the answer as events."""


class Generation:
    """The endpoint of one form, as an ASGI application.

    If a client disconnects while its request waits, runs or is sent, the request is aborted at once, and its slot
    is free for the next planned step. A client that reads slowly gets all text since its last chunk in one piece;
    the engine never waits for clients.
    """

    def __init__(self, service: Service, form: Form) -> None:
        self._service = service
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        call = await self._read(scope, receive)
        name = f"{answer_prefix(call.request)}{uuid.uuid4().hex}"
        with service.admit(call.sequences):
            try:
                async with _watching(receive) as gone:
                    submission = await self._submit(scope, call, name)
                    submission.end_with(gone)
                    answer = self._stream if call.stream else self._answer
                    try:
                        await answer(_with_left(send, submission.left), call, name, submission)
                    finally:
                        submission.close()
            except ClientGone:
                cut_off(scope)

    async def _read(self, scope: Scope, receive: Receive) -> HttpCall:
        bodies = self._service.bodies
        async with bodies.whole(scope, receive) as raw:
            return await bodies.parsed(lambda: self._form.parse(raw, scope), self._form.size(raw, scope))

    async def _submit(self, scope: Scope, call: HttpCall, name: str) -> Submission:
        """Queue the call, or a shorter one if it does not fit."""
        without, shorter = 0, call
        while True:
            try:
                return await self._queue(scope, shorter, name)
            except ApiError as error:
                without = 2 * without + 1
                found = self._form.shorter(call, without) if error.code == TOO_LONG else None
                if found is None:
                    raise
                shorter = replace(call, request=found.request)

    async def _queue(self, scope: Scope, call: HttpCall, name: str) -> Submission:
        try:
            return await self._service.submit(
                call.request,
                name,
                every_token=call.stream,
                salt=scope["state"].get("tenant", ""),
                deadline_s=_deadline(scope, self._service.settings.request_timeout_s),
                headers=scope["headers"],
            )
        except Exception as error:
            raise api_error(error) from error

    async def _answer(self, send: Send, call: HttpCall, name: str, submission: Submission) -> None:
        """Wait until all prompts have ended, and send one answer."""
        outputs = await self._whole(call, submission)
        await send_whole(send, self._service.turns, self._form.answer(call, outputs, name, submission))

    async def _whole(self, call: HttpCall, submission: Submission) -> list[RequestOutput]:
        """The outputs of all prompts. Raises ApiError when the first of them fails."""
        parts: list[dict[int, CompletionOutput]] = [{} for _ in call.request.prompts]
        last: list[RequestOutput | None] = [None] * len(parts)
        while not submission.finished:
            await submission.next_news()
            for index, output in submission.take():
                if (error := output_error(call.request, output)) is not None:
                    raise ended(error)
                parts[index] |= {each.index: each for each in output.outputs}
                last[index] = output
        return [
            asked_for(call.request, replace(output, outputs=tuple(found[each] for each in sorted(found))))
            for output, found in zip(last, parts, strict=True)
            if output is not None
        ]

    async def _stream(self, send: Send, call: HttpCall, name: str, submission: Submission) -> None:
        """Send new text whenever the socket accepts more."""
        turns, stream = self._service.turns, self._form.stream(call, name, submission)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for part in turns.parts(stream.begin()):
            await send_part(send, part)
        failed = False
        while not (failed or submission.finished):
            await submission.next_news()
            news = submission.take()
            failed = any(output_error(call.request, output) is not None for _, output in news)
            async for part in turns.parts(stream.events(news, whole=submission.finished)):
                await send_part(send, part)
        await send_part(send, b"", last=True)


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Send one complete answer."""
    lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_whole(send: Send, turns: Turns, pieces: Iterator[bytes]) -> None:
    """Send a JSON answer: at once if it is one part, else in parts that are encoded as the client reads them."""
    first, begun = None, False
    async for part in turns.parts(pieces):
        if first is None:
            first = part
            continue
        if not begun:
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send_part(send, first)
            begun = True
        await send_part(send, part)
    if begun:
        await send_part(send, b"", last=True)
    else:
        await send_json(send, 200, first or b"")


async def send_part(send: Send, data: bytes, *, last: bool = False) -> None:
    """Send a part of an answer whose headers were sent."""
    await send({"type": "http.response.body", "body": data, "more_body": not last})


def _with_left(send: Send, left: Sequence[str]) -> Send:
    """`send`, with a header that names what the answer's constraint leaves to the client."""
    if not left:
        return send
    told = "".join(each if each.isprintable() else " " for each in ", ".join(left)[:MAX_LEFT])
    line = LEFT_HEADER, told.encode("ascii", "backslashreplace")

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], line]}
        await send(message)

    return sending


def cut_off(scope: Scope) -> None:
    """Close the connection of a client that does not read."""
    if (abort := scope["state"].get("abort_connection")) is not None:
        abort()


@contextlib.asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client disconnects."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(wait())
    try:
        yield task
    finally:
        task.cancel()


def _deadline(scope: Scope, longest: float | None) -> float | None:
    """Time limit of the answer in seconds: the server's, or a lower one from a header. Raises ApiError."""
    asked = next((value for name, value in scope["headers"] if name == TIMEOUT_HEADER), None)
    if asked is None:
        return longest
    if not (asked.isdigit() and 0 < len(asked) <= 9 and int(asked) > 0):
        raise invalid("x-request-timeout-ms must be whole milliseconds above 0")
    return min(int(asked) / 1000, longest or float("inf"))
