"""The HTTP side of files and batches."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from xla_engine.batch.envelope import URLS
from xla_engine.server.batches.records import UNFINISHED, BatchRecord, new_id, shown
from xla_engine.server.batches.store import owned, page
from xla_engine.server.batches.worker import Batches
from xla_engine.server.bodies import read_body
from xla_engine.server.errors import ApiError
from xla_engine.server.info import JsonResponse
from xla_engine.server.service import Service

FORM_SLACK = 64 << 10  # bytes of a form beside its file
MOST_METADATA = 16
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_SECONDS = {"h": 3600, "d": 86400}

Handler = Callable[[Request], Awaitable[Response]]


class CreateBatch(msgspec.Struct, kw_only=True):
    """The body of a POST to /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class BatchRoutes:
    """Handlers over one store. What another key owns is as if it did not exist."""

    def __init__(self, service: Service, batches: Batches) -> None:
        self._service = service
        self._batches = batches
        self._store = batches.store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files/{id}", self.file, methods=["GET"]),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches/{id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Take a file, whose bytes go to disk as they come."""
        settings = self._service.settings
        limited = Request(request.scope, self._limited(request))
        try:
            form = await limited.form(max_files=1, max_fields=8, max_part_size=FORM_SLACK)
        except MultiPartException as error:
            raise ApiError(400, error.message, code="invalid_request") from error
        async with _closing(form):
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(400, 'no "file" in the form', code="invalid_request", param="file")
            if purpose != "batch":
                message = f'purpose must be "batch", not {purpose!r}'
                raise ApiError(400, message, code="invalid_request", param="purpose")
            if (file.size or 0) > settings.max_file_bytes:
                raise self._too_large()
            record = await asyncio.to_thread(
                self._store.add_file,
                file.file,
                filename=(file.filename or "batch.jsonl")[:255],
                purpose="batch",
                tenant=_tenant(request),
                expires_at=_expiry(form),
            )
        return JsonResponse(shown(record))

    def _limited(self, request: Request) -> Callable[[], Awaitable[Message]]:
        """`receive` with a bound to the whole form and to the wait for each piece."""
        settings, size = self._service.settings, 0

        async def receive() -> Message:
            nonlocal size
            try:
                message = await asyncio.wait_for(request.receive(), settings.body_timeout_s)
            except TimeoutError as error:
                late = "the file does not come; send it faster"
                raise ApiError(408, late, code="request_timeout", headers={"connection": "close"}) from error
            size += len(message.get("body", b""))
            if size > settings.max_file_bytes + FORM_SLACK:
                raise self._too_large()
            return message

        return receive

    def _too_large(self) -> ApiError:
        limit = self._service.settings.max_file_bytes
        return ApiError(
            413,
            f"the file has more than {limit} bytes; send it in parts",
            code="file_too_large",
            headers={"connection": "close"},
        )

    async def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        mine = [
            record
            for record in list(self._store.files.values())
            if record.tenant == _tenant(request) and purpose in (None, record.purpose)
        ]
        newest = request.query_params.get("order", "desc") != "asc"
        return _list(*page(mine, *_window(request, 10_000), newest_first=newest))

    async def file(self, request: Request) -> Response:
        return JsonResponse(shown(self._file(request)))

    async def content(self, request: Request) -> Response:
        record = self._file(request)
        return FileResponse(self._store.data_path(record.id), media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        record = self._file(request)
        await asyncio.to_thread(self._store.delete_file, record.id)
        return JsonResponse({"id": record.id, "object": "file", "deleted": True})

    def _file(self, request: Request) -> Any:
        return owned(self._store.files, request.path_params["id"], _tenant(request), "file")

    async def create(self, request: Request) -> Response:
        service = self._service
        raw = await read_body(request.scope, request.receive, service.settings, service.bodies)
        try:
            body = msgspec.json.decode(raw, type=CreateBatch)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(400, f"the body is not what is asked for: {error}", code="invalid_json") from error
        if service.refusing:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "1"})
        if body.endpoint not in URLS:
            message = f"endpoint must be one of {', '.join(URLS)}, not {body.endpoint!r}"
            raise ApiError(400, message, code="invalid_request", param="endpoint")
        window = _WINDOW.fullmatch(body.completion_window)
        if window is None:
            message = f'completion_window must be hours or days, as "24h", not {body.completion_window!r}'
            raise ApiError(400, message, code="invalid_request", param="completion_window")
        _check_metadata(body.metadata)
        source = owned(self._store.files, body.input_file_id, _tenant(request), "file")
        if source.purpose != "batch":
            message = 'the input must be a file of purpose "batch"'
            raise ApiError(400, message, code="invalid_request", param="input_file_id")
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + int(window[1]) * _SECONDS[window[2]],
            metadata=body.metadata,
            model=service.settings.model_names[0],
            tenant=_tenant(request),
            results_id=new_id("file-"),
            errors_id=new_id("file-"),
        )
        await asyncio.to_thread(self._store.add_batch, record)
        self._batches.wake()
        return JsonResponse(shown(record))

    async def list_batches(self, request: Request) -> Response:
        mine = [record for record in list(self._store.batches.values()) if record.tenant == _tenant(request)]
        return _list(*page(mine, *_window(request, 20), newest_first=True))

    async def batch(self, request: Request) -> Response:
        return JsonResponse(shown(self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        record = self._batch(request)
        if record.status not in UNFINISHED or record.status == "finalizing":
            message = f"cannot cancel a batch with status '{record.status}'; only one that is not finished"
            raise ApiError(409, message, code="not_cancellable")
        if record.status != "cancelling":
            self._batches.cancel(record)
        return JsonResponse(shown(record))

    def _batch(self, request: Request) -> BatchRecord:
        return owned(self._store.batches, request.path_params["id"], _tenant(request), "batch")


class _closing:
    """Closes a form's temporary file."""

    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()


def _tenant(request: Request) -> str:
    return str(request.scope["state"].get("tenant", ""))


def _window(request: Request, default: int) -> tuple[str | None, int]:
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 10_000):
        raise ApiError(400, "limit must be from 1 to 10000", code="invalid_request", param="limit")
    return request.query_params.get("after"), int(limit)


def _list(records: list[Any], has_more: bool) -> Response:
    data = [shown(record) for record in records]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JsonResponse(
        {"object": "list", "data": data, "first_id": None, "last_id": None, **ends, "has_more": has_more}
    )


def _expiry(form: Any) -> int | None:
    seconds = form.get("expires_after[seconds]")
    if seconds is None:
        return None
    if not (isinstance(seconds, str) and seconds.isdigit() and 3600 <= int(seconds[:9]) <= 2_592_000):
        message = "expires_after[seconds] must be from 3600 to 2592000"
        raise ApiError(400, message, code="invalid_request", param="expires_after")
    return int(time.time()) + int(seconds)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            message = "metadata has keys of at most 64 characters and values of at most 512"
            raise ApiError(400, message, code="invalid_request", param="metadata")
    if len(metadata or {}) > MOST_METADATA:
        raise ApiError(
            400, f"metadata has at most {MOST_METADATA} pairs", code="invalid_request", param="metadata"
        )
