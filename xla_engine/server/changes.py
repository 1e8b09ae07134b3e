"""Endpoints for operators: load and unload adapters, and reset the prefix cache."""

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from xla_engine.errors import XlaEngineError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.server.errors import ApiError, api_error, invalid
from xla_engine.server.info import JsonResponse
from xla_engine.server.service import Service

T = TypeVar("T")


class _Load(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _Unload(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


class Changes:
    """Handlers with vLLM's paths.

    Without `allow_runtime_changes` they answer with status 403, because an adapter's path may be any path of this
    machine, and a reset makes everybody's prompts slower.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._one = asyncio.Lock()  # one change at a time

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Load an adapter, which requests name as their `model` from then on; with `load_inplace`, again."""
        body = await self._body(request, _Load)
        service, engine = self._service, self._service.engine
        async with self._one:
            if body.load_inplace and body.lora_name in service.loaded:
                await self._removed(body.lora_name)
            if body.lora_name in service.model_names:
                message = f"a model {body.lora_name!r}; unload it, or give the adapter another name"
                raise invalid(message, "lora_name")
            try:
                adapter = LoRARequest(body.lora_name, max(engine.list_loras(), default=0) + 1, body.lora_path)
                await asyncio.to_thread(engine.add_lora, adapter)
            except (XlaEngineError, OSError) as error:
                raise _refused(error) from error
            engine.pin_lora(adapter.lora_int_id)
            service.loaded[body.lora_name] = adapter
        return JsonResponse({"id": body.lora_name, "object": "model", "root": body.lora_path})

    async def unload(self, request: Request) -> Response:
        """Let go of an adapter that `load` has loaded; not while requests have it."""
        body = await self._body(request, _Unload)
        async with self._one:
            if body.lora_name not in self._service.loaded:
                names = ", ".join(self._service.loaded) or "none"
                message = f"no adapter {body.lora_name!r} was loaded over HTTP; these were: {names}"
                raise ApiError(404, message, code="model_not_found", param="lora_name")
            await self._removed(body.lora_name)
        return JsonResponse({"id": body.lora_name, "object": "model", "deleted": True})

    async def reset(self, _: Request) -> Response:
        """Forget cached prefixes."""
        self._check()
        self._service.engine.reset_prefix_cache()
        return Response(status_code=200)

    async def _removed(self, name: str) -> None:
        loaded = self._service.loaded
        adapter = loaded.pop(name)  # first, so that no new request can use it
        try:
            self._service.engine.remove_lora(adapter.lora_int_id)
        except XlaEngineError as error:
            loaded[name] = adapter
            raise _refused(error) from error

    async def _body(self, request: Request, kind: type[T]) -> T:
        self._check()
        return await self._service.bodies.typed(request, kind)

    def _check(self) -> None:
        if not self._service.settings.allow_runtime_changes:
            message = "runtime changes are not allowed; start the server with --allow-runtime-changes"
            raise ApiError(403, message, code="not_allowed")


def _refused(error: Exception) -> ApiError:
    if isinstance(error, OSError):
        return invalid(f"the adapter cannot be read: {error}", "lora_path")
    found = api_error(error)
    return found if found.status < 500 else invalid(str(error), "lora_path")
