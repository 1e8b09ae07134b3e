"""Informational endpoints: probes, metrics, models, tokenizer, and the state of requests."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xla_engine import __version__
from xla_engine.errors import XlaEngineError
from xla_engine.observability.metrics import CONTENT_TYPE, MetricFamily, counter, gauge, text_of
from xla_engine.openai.answers import list_pieces
from xla_engine.server.bodies import check_model
from xla_engine.server.errors import api_error, invalid
from xla_engine.server.fairness import FairWorker, Shares
from xla_engine.server.generation import send_whole
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import LONG_TEXT, Service
from xla_engine.server.turns import Turns
from xla_engine.text.parsers.chats import Chat
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.digits import number_of
from xla_engine.utils.plain import integer_of
from xla_engine.utils.resident import resident_bytes
from xla_engine.utils.shown import shown

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}
MAX_TEXT = 1 << 20  # characters to tokenise, or ids to detokenise
QUEUED = 16 * MAX_TEXT  # limit on both over all unsent answers; half of it per key
PIECE_TOKENS = 512  # tokens encoded together, in less than a millisecond
SHOWN_WAITING = 1000  # limit on listed waiting requests; `num_waiting` counts all


class JsonResponse(Response):
    """A value as JSON, by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class MadeResponse(Response):
    """A JSON answer that is encoded as the client reads it. held: closed at the end."""

    def __init__(self, turns: Turns, pieces: Iterator[bytes], held: contextlib.ExitStack) -> None:
        super().__init__(media_type="application/json")
        self._turns, self._pieces, self._held = turns, pieces, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await send_whole(send, self._turns, self._pieces)


def limit_of(request: Request, default: int, *, most: int) -> int:
    """How many items of a list a request asks for with `limit`. Raises ApiError."""
    limit = number_of(request.query_params.get("limit", str(default)), most)
    if limit is None or not 1 <= limit <= most:
        raise invalid(f"limit must be from 1 to {most}", "limit")
    return limit


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize. tokens: ids, which count by value."""

    tokens: Annotated[list[int | float], msgspec.Meta(max_length=MAX_TEXT)]
    model: str | None = None


class Info:
    """Handlers for one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._long = FairWorker("tokenize")  # one long text at a time
        self._shares = Shares(QUEUED, "too many texts are being tokenised; retry later")
        page = files("xla_engine.server").joinpath("page.html").read_text(encoding="utf-8")
        self._page = page.replace("READER_DEFAULTS", json.dumps(dict(service.settings.reader_defaults)))

    async def health(self, _: Request) -> Response:
        """Whether the process can do its work: 503 once the engine is gone; and its heartbeat."""
        engine, is_alive = self._service.engine, self._service.is_alive
        beat = {"status": "ok" if is_alive else str(engine.closed_because)}
        age = engine.stats().last_step_age_s
        return JsonResponse({**beat, "last_step_age_s": age}, status_code=200 if is_alive else 503)

    async def ready(self, _: Request) -> Response:
        """Whether new requests should come here: 503 too while the server is about to end."""
        service = self._service
        return Response(status_code=200 if service.is_alive and not service.draining else 503)

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": __version__, "system_fingerprint": self._service.fingerprint})

    async def metrics(self, _: Request) -> Response:
        return Response(metrics_text(self._service), media_type=CONTENT_TYPE)

    async def models(self, _: Request) -> Response:
        data = [self._model(name) for name in self._service.model_names]
        return JsonResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, self._service.model_names)
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "xla-engine",
            "root": service.settings.model_names[0],
            "parent": None,
            "max_model_len": service.engine.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text, as a request with it would have them."""
        body = await self._body(request, TokenizeBody)
        engine, tokenizer = self._service.engine, self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        special = body.add_special_tokens
        try:
            if body.messages is not None:
                options = {
                    "add_generation_prompt": body.add_generation_prompt,
                    "continue_final_message": body.continue_final_message,
                    "chat_template_kwargs": body.chat_template_kwargs,
                    "tools": body.tools,
                    "chat_template": self._service.settings.sampling_defaults.get("chat_template"),
                }
                chat = Chat(messages=tuple(body.messages), options=options)
                text = await self._service.rendering.render(chat, tenant_of(request))
                special = bool(special)
            else:
                text, special = body.prompt or "", special is None or special
            if len(text) > MAX_TEXT:
                raise invalid(f"more than {MAX_TEXT} characters; send them in parts")
        except XlaEngineError as error:
            raise api_error(error) from error
        spelled = tokenizer if body.return_token_strs else None
        return await self._made(
            request,
            len(text),
            lambda: tokenizer.encode(text, add_special_tokens=special),
            lambda ids: _tokenized(ids, engine.max_model_len, spelled),
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, as their `decode` at once would give it."""
        body = await self._body(request, DetokenizeBody)
        tokenizer, tokens = self._tokenizer(), body.tokens
        return await self._made(
            request, len(tokens), lambda: map(_token_id, tokens), lambda ids: _detokenized(ids, tokenizer)
        )

    async def _made(
        self,
        request: Request,
        size: int,
        encode: Callable[[], Iterable[int]],
        pieces: Callable[[Sequence[int]], Iterator[bytes]],
    ) -> Response:
        """An answer that is encoded as the client reads it. size: of the input, in characters or tokens."""
        tenant = tenant_of(request)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._shares.hold(size, tenant))

            def compact() -> array[int]:  # four bytes each
                return array("I", encode())

            ids = compact() if size <= LONG_TEXT else await self._long.run(compact, tenant)
            return MadeResponse(self._service.turns, pieces(ids), stack.pop_all())

    async def tokenizer_info(self, _: Request) -> Response:
        """What a remote evaluation needs to know of the tokenizer."""
        engine, tokenizer = self._service.engine, self._tokenizer()
        template = engine.chat_template
        names = template.special_tokens if template is not None else {}
        eos = engine.validator.eos_token_ids
        spelled = tokenizer.decode(list(eos[:1]), skip_special_tokens=False) if eos else None
        return JsonResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "vocab_size": tokenizer.vocab_size,
                "max_model_len": engine.max_model_len,
                "eos_token": names.get("eos_token", spelled),
                "bos_token": names.get("bos_token"),
                "pad_token": names.get("pad_token"),
                "chat_template": None if template is None else template.sources.get("default"),
            }
        )

    async def page(self, _: Request) -> Response:
        """The page at /, which asks `/v1/requests` and loads nothing else."""
        return Response(self._page, media_type="text/html", headers=_PAGE_HEADERS)

    async def requests(self, request: Request) -> Response:
        """Who is in which slot, who waits, and why: the scheduler's snapshot.

        With `?since=SECONDS` (Unix time) what happened after that moment, too.
        """
        since = request.query_params.get("since")
        engine, service = self._service.engine, self._service
        snapshot = engine.snapshot()
        stats = engine.stats()
        return JsonResponse(
            {
                "model": service.settings.model_names[0],
                "fingerprint": service.fingerprint,
                "slots": snapshot.slots,
                "num_waiting": len(snapshot.waiting),
                "waiting": snapshot.waiting[:SHOWN_WAITING],
                "draining": snapshot.draining,
                "counters": snapshot.counters,
                "kv_usage": stats.kv_usage,
                "finished": stats.finished,
                "server": {
                    "live": service.live,
                    "draining": service.draining,
                    "refused": service.times.refused,
                    "batches": len(service.batch_jobs),
                },
                "history": None if since is None else service.history.since(_moment(since)),
            }
        )

    def _tokenizer(self) -> Tokenizer:
        if (tokenizer := self._service.engine.tokenizer) is None:
            raise invalid("the model has no tokenizer.json; use token ids")
        return tokenizer

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        body = await self._service.bodies.typed(request, kind)
        check_model(body.model, self._service.model_names)
        return body


def _tokenized(ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer | None) -> Iterator[bytes]:
    """The answer of /tokenize; tokenizer: None leaves out `token_strs`."""
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), max_model_len)
    parts = [list(ids[begin : begin + PIECE_TOKENS]) for begin in range(0, len(ids), PIECE_TOKENS)]
    yield from list_pieces(parts)
    yield b',"token_strs":'
    if tokenizer is None:
        yield b"null"
    else:
        yield from list_pieces(list(map(tokenizer.token_string, part)) for part in parts)
    yield b"}"


def _token_id(value: float) -> int:
    """The id that a number of a body is. Raises ApiError."""
    token = integer_of(value)
    if token is None or not 0 <= token < 2**31:
        raise invalid(f"tokens must be ids, whole numbers of at least 0, not {shown(value)}", "tokens")
    return token


def _detokenized(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[bytes]:
    """The answer of /detokenize."""
    text = tokenizer.incremental(skip_special_tokens=False)
    yield b'{"prompt":"'
    for begin in range(0, len(ids), PIECE_TOKENS):
        yield msgspec.json.encode("".join(text.push_all(ids[begin : begin + PIECE_TOKENS])))[1:-1]
    yield msgspec.json.encode(text.flush())[1:-1] + b'"}'


def _moment(text: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if not math.isfinite(moment):
        raise invalid("since must be a number of seconds", "since")
    return moment


def server_metrics(service: Service) -> tuple[MetricFamily, ...]:
    """The metrics that only a server has."""
    model, times = {"model_name": service.settings.model_names[0]}, service.times
    resident = resident_bytes()
    answers = [(count, {"path": path, "status": status}) for (path, status), count in times.responses.items()]
    info = {"version": __version__, "fingerprint": service.fingerprint}
    return (
        gauge("xla_engine_interactive_live", "Sequences of accepted HTTP requests.", [(service.live, model)]),
        gauge("xla_engine_draining", "1 while the server drains.", [(float(service.draining), model)]),
        counter(
            "xla_engine_refused_total",
            "Requests refused because the queue was full.",
            [(times.refused, model)],
        ),
        counter("xla_engine_http_responses_total", "Answers by path and status.", answers),
        gauge(
            "process_resident_memory_bytes",
            "Memory of the server's process, weights included.",
            [] if resident is None else [(resident, {})],
        ),
        gauge("xla_engine_info", "Version and fingerprint of this server.", [(1, info)]),
    )


def metrics_text(service: Service) -> str:
    """All metrics. Those of the engine have the model's name as a label, as in vLLM."""
    engine = service.engine.metrics(service.settings.model_names[0])
    return text_of((*engine, *server_metrics(service)))
