"""The ASGI application: routes and middleware."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from xla_engine.openai.fields import RESPONSES_URL, URLS
from xla_engine.openai.pooling import RERANK_URL, SCORE_URL
from xla_engine.server.batches.routes import BatchRoutes
from xla_engine.server.batches.store import BatchStore
from xla_engine.server.batches.worker import Batches
from xla_engine.server.changes import Changes
from xla_engine.server.completions import completions
from xla_engine.server.errors import MESSAGES_URL, ApiError
from xla_engine.server.generation import Generation
from xla_engine.server.info import Info, JsonResponse
from xla_engine.server.messages import Messages
from xla_engine.server.middleware import ApiErrors, ApiKeys, RequestContext
from xla_engine.server.openapi import description
from xla_engine.server.responses import Responses
from xla_engine.server.service import Service
from xla_engine.server.written import Written

# Alternative paths, which vLLM has as well.
_ALIASES = {"/score": SCORE_URL, "/rerank": RERANK_URL, "/v2/rerank": RERANK_URL}
_EXPOSED = [
    "retry-after",
    "x-left-to-client",
    "x-request-id",
]  # response headers that cross-origin scripts may read


def make_app(service: Service) -> Starlette:
    """The ASGI application of one service. It closes the service's engine when it shuts down."""

    folder = service.settings.batch_dir
    batches = (
        None if folder is None else Batches(service, BatchStore(folder, service.settings.max_stored_bytes))
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if batches is not None:
            batches.start()
        service.history.watch()
        sampling = asyncio.create_task(service.history.sample())
        try:
            yield
        finally:
            sampling.cancel()
            if batches is not None:
                await batches.close()
            service.rendering.close()
            service.pictures.close()
            service.constraints.close()
            await service.llm.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    origins = list(service.settings.allowed_origins)
    every: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": _EXPOSED}
    cors = [Middleware(CORSMiddleware, allow_origins=origins, **every)]
    routes = [
        *_routes(service),
        *(_NO_BATCHES if batches is None else BatchRoutes(service, batches).routes()),
    ]
    page = JsonResponse(description(routes, has_keys=bool(service.settings.api_keys))).body
    routes.append(Route("/openapi.json", lambda _: Response(page, media_type="application/json")))
    paths = frozenset(route.path for route in routes if "{" not in route.path)
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(
                RequestContext,
                times=service.times,
                paths=paths,
                send_timeout_s=service.settings.send_timeout_s,
            ),
            *(cors if origins else []),
            Middleware(ApiErrors),
            Middleware(ApiKeys, keys=service.settings.api_keys),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def _routes(service: Service) -> list[Route]:
    info, responses, messages = Info(service), Responses(service), Messages(service)
    return [
        Route("/", info.page),
        Route("/health", info.health),
        Route("/ping", info.health, methods=["GET", "POST"]),
        Route("/ready", info.ready),
        Route("/version", info.version),
        Route("/metrics", info.metrics),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/v1/requests", info.requests),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/tokenizer_info", info.tokenizer_info),
        *(Route(url, completions(service, url), methods=["POST"]) for url in URLS if url != RESPONSES_URL),
        *(Route(path, completions(service, url), methods=["POST"]) for path, url in _ALIASES.items()),
        Route("/v1/responses", Generation(service, Written(responses)), methods=["POST"]),
        Route("/v1/responses/{id}", responses.read, methods=["GET"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
        Route(MESSAGES_URL, Generation(service, Written(messages)), methods=["POST"]),
        Route(f"{MESSAGES_URL}/count_tokens", messages.count_tokens, methods=["POST"]),
        *Changes(service).routes(),
    ]


async def _no_batches(_: Request) -> Response:
    """Answer requests for files and batches if the server has no `--batch-dir`."""
    raise ApiError(
        404, "this server has no files and batches; start it with --batch-dir DIR", code="no_batch_dir"
    )


_NO_BATCHES = [
    Route(path, _no_batches, methods=["GET", "POST", "DELETE"])
    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
]


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an HTTPException of Starlette, for example for an unknown path."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    found = {
        404: f"no such path: {path[:200]}; {_hint(path, request.app.routes)}",
        405: f"this path takes {(error.headers or {}).get('Allow')}, not {request.method}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    answer = ApiError(error.status_code, found.get(error.status_code, error.detail), code=code)
    return Response(answer.json(path), error.status_code, error.headers, media_type="application/json")


# Paths of llama.cpp's and Ollama's own APIs, and what this server has instead.
_ELSEWHERE = {
    "/api/chat": "POST /v1/chat/completions",
    "/api/embed": "POST /v1/embeddings",
    "/api/embeddings": "POST /v1/embeddings",
    "/api/generate": "POST /v1/completions",
    "/api/ps": "GET /v1/models",
    "/api/show": "GET /v1/models",
    "/api/tags": "GET /v1/models",
    "/api/version": "GET /version",
    "/apply-template": "POST /tokenize",
    "/completion": "POST /v1/completions",
    "/infill": "POST /v1/completions with suffix",
    "/props": "GET /v1/models",
    "/slots": "GET /v1/requests",
}


def _hint(path: str, routes: Sequence[Any]) -> str:
    """What a client that asks for a path may want."""
    speaks = "this server speaks OpenAI's API under /v1 and Anthropic's at /v1/messages"
    if ours := _ELSEWHERE.get(path.rstrip("/")):
        return f"{speaks}; use {ours}"
    known = {route.path for route in routes}
    for other in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        if other in known and other != path:
            return f"did you mean {other}? A client of OpenAI's API needs a base URL that ends with one /v1"
    return f"{speaks}; GET /openapi.json lists the paths"
