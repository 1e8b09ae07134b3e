"""`/v1/completions` and `/v1/chat/completions`, streamed and whole; and what models answer that pool."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from xla_engine.batch.results import answer_prefix, asked_for, output_error, result_body
from xla_engine.outputs import RequestOutput
from xla_engine.server.bodies import read_body
from xla_engine.server.chunks import DONE, ChunkWriter, event
from xla_engine.server.errors import ApiError, ClientGone, api_error, ended
from xla_engine.server.service import Service, Submission
from xla_engine.server.wire import Call, parse_call, read_json

LARGE_BODY = 128 << 10  # bytes; a larger one is parsed beside the event loop
TIMEOUT_HEADER = b"x-request-timeout-ms"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """The endpoint of one path of `xla_engine.batch.envelope.URLS`, as an ASGI application.

    A client that hangs up is noticed while its request waits, runs or is sent, and the request is aborted at once: its
    slot is free for the next step that is planned. A client that reads slowly gets what has come meanwhile in one
    piece; the engine waits for none.
    """

    prefix = ""  # of the ids of answers; empty: what fits the request

    def __init__(self, service: Service, url: str) -> None:
        self._service = service
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        raw = await read_body(scope, receive, service.settings, service.bodies)
        call = await (
            asyncio.to_thread(self._parse, raw, scope)
            if len(raw) > LARGE_BODY
            else _now(self._parse(raw, scope))
        )
        name = f"{self.prefix or answer_prefix(call.request)}{uuid.uuid4().hex}"
        with service.admit(call.sequences):
            try:
                async with _watching(receive) as gone:
                    submission = await self._submit(scope, call, name)
                    gone.add_done_callback(lambda _: submission.news.set())
                    try:
                        if call.stream:
                            await self._stream(send, call, name, submission, gone)
                        else:
                            await self._answer(send, call, name, submission, gone)
                    finally:
                        submission.close()
            except ClientGone:
                abort = scope["state"].get("abort_connection")
                if abort is not None:
                    abort()

    def _parse(self, raw: bytes, scope: Scope) -> Call:
        service = self._service
        return parse_call(read_json(raw), self._url, service.defaults(), service.settings.model_names)

    async def _submit(self, scope: Scope, call: Call, name: str) -> Submission:
        try:
            return await self._service.submit(
                call.request,
                name,
                every_token=call.stream,
                salt=scope["state"].get("tenant", ""),
                deadline_s=_deadline(scope, self._service.settings.request_timeout_s),
            )
        except Exception as error:
            raise api_error(error) from error

    async def _answer(
        self, send: Send, call: Call, name: str, submission: Submission, gone: asyncio.Task[None]
    ) -> None:
        """Wait for every prompt's end and answer in one piece."""
        outputs: list[RequestOutput | None] = [None] * len(call.request.prompts)
        while not submission.finished:
            await next_news(submission, gone)
            for index, output in submission.take():
                if (error := output_error(call.request, output)) is not None:
                    raise ended(error)
                outputs[index] = asked_for(call.request, output)
        whole = [output for output in outputs if output is not None]
        body = result_body(call.request, whole, name, self._service.header())
        if call.request.pooling is not None:
            await send_json(send, 200, msgspec.json.encode(body))
            return
        cached = sum(output.num_cached_tokens for output in whole)
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        if call.return_token_ids:
            _add_token_ids(body, whole)
        await send_json(send, 200, msgspec.json.encode(body))

    async def _stream(
        self, send: Send, call: Call, name: str, submission: Submission, gone: asyncio.Task[None]
    ) -> None:
        """Send what is new whenever the socket takes more."""
        patience = self._service.settings.send_timeout_s
        writer = ChunkWriter(call, name, self._service.header(), thinking=submission.thinking)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        while not submission.finished:
            await next_news(submission, gone)
            pieces: list[bytes] = []
            for index, output in submission.take():
                pieces += writer.events(index, output)
                error = output_error(call.request, output) if output.finished else None
                if error is not None:
                    await send_part(send, b"".join([*pieces, event(ended(error).body()), DONE]), patience)
                    await send_part(send, b"", patience, last=True)
                    return
            if submission.finished:
                pieces += writer.last_events()
            if pieces:
                await send_part(send, b"".join(pieces), patience)
        await send_part(send, b"", patience, last=True)


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole answer."""
    lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_part(send: Send, data: bytes, patience: float, *, last: bool = False) -> None:
    """Raises ClientGone where the client does not take it in time."""
    message: Message = {"type": "http.response.body", "body": data, "more_body": not last}
    try:
        async with asyncio.timeout(patience):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise ClientGone("it takes nothing") from error


async def next_news(submission: Submission, gone: asyncio.Task[None]) -> None:
    """Wait until there is something to take. Raises ClientGone."""
    await submission.news.wait()
    if gone.done():
        raise ClientGone


@contextlib.asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client hangs up."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(wait())
    try:
        yield task
    finally:
        task.cancel()


def _deadline(scope: Scope, longest: float | None) -> float | None:
    """Seconds for the answer: the server's bound, or less where a header asks for less. Raises ApiError."""
    asked = next((value for name, value in scope["headers"] if name == TIMEOUT_HEADER), None)
    if asked is None:
        return longest
    if not (asked.isdigit() and 0 < len(asked) <= 9 and int(asked) > 0):
        raise ApiError(400, "x-request-timeout-ms must be whole milliseconds above 0", code="invalid_request")
    return min(int(asked) / 1000, longest or float("inf"))


def _add_token_ids(body: dict[str, Any], outputs: list[RequestOutput]) -> None:
    """The ids of each choice, and where vLLM has them those of the prompt: its first choice, or the body of a chat."""
    choices = body["choices"]
    completions = [completion for output in outputs for completion in output.outputs]
    for choice, completion in zip(choices, completions, strict=True):
        choice["token_ids"] = completion.token_ids
    places = [body] if body["object"] == "chat.completion" else choices[:: len(outputs[0].outputs)]
    for output, place in zip(outputs, places, strict=True):
        place["prompt_token_ids"] = output.prompt_token_ids


async def _now(call: Call) -> Call:
    return call
