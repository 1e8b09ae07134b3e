"""The application: paths, and what every request passes through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from xla_engine.batch.requests import CHAT_URL, COMPLETIONS_URL
from xla_engine.server.batches.routes import BatchRoutes
from xla_engine.server.batches.store import Store
from xla_engine.server.batches.worker import Batches
from xla_engine.server.errors import ApiError
from xla_engine.server.generation import Generation
from xla_engine.server.info import Info, JsonResponse
from xla_engine.server.middleware import ApiKeys, RequestContext
from xla_engine.server.responses.endpoint import Responses
from xla_engine.server.service import Service


def make_app(service: Service) -> Starlette:
    """The ASGI application of one service, whose engine it closes at its end."""

    folder = service.settings.batch_dir
    batches = None if folder is None else Batches(service, Store(folder))
    service.batches = batches

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
            await service.llm.close()

    origins = list(service.settings.allowed_origins)
    cors = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]
    routes = [*_routes(service), *([] if batches is None else BatchRoutes(service, batches).routes())]
    paths = frozenset(route.path for route in routes if "{" not in route.path)
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(RequestContext, times=service.times, paths=paths),
            *(cors if origins else []),
            Middleware(ApiKeys, keys=service.settings.api_keys),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


def _routes(service: Service) -> list[Route]:
    info = Info(service)
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
        Route(COMPLETIONS_URL, Generation(service, COMPLETIONS_URL), methods=["POST"]),
        Route("/v1/responses", Responses(service), methods=["POST"]),
        Route(CHAT_URL, Generation(service, CHAT_URL), methods=["POST"]),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses."""
    assert isinstance(error, HTTPException)
    found = {404: f"there is no path {request.url.path[:200]}", 405: f"this path has no {request.method}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    answer = ApiError(error.status_code, found.get(error.status_code, error.detail), code=code)
    return JsonResponse(answer.body(), status_code=error.status_code, headers=error.headers)


async def _internal_error(_: Request, error: Exception) -> Response:
    answer = ApiError(500, "the server failed at this request; its log tells more", code="internal_error")
    return JsonResponse(answer.body(), status_code=500)
