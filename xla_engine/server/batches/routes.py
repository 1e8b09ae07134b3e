"""HTTP routes of files and batches."""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from xla_engine.errors import InvalidRequestError
from xla_engine.openai.fields import URLS, check_labels
from xla_engine.server.batches.store import (
    UNFINISHED,
    BatchRecord,
    FileRecord,
    new_id,
    newest_last,
    owned,
    room_on_disk,
    shown,
)
from xla_engine.server.batches.worker import Batches
from xla_engine.server.errors import ApiError, ClientGone, busy, invalid
from xla_engine.server.info import JsonResponse, limit_of
from xla_engine.server.middleware import tenant_of
from xla_engine.server.service import Service
from xla_engine.utils.digits import number_of

_MOST_SECONDS = 2_592_000  # that a file is kept
FORM_SLACK = 64 << 10  # bytes of a form in addition to its file
UPLOADS = 8  # concurrent uploads of one tenant; each has a temporary file
MOST_BATCHES = 100  # in one list
MAX_BATCH_BODY = 256 << 10  # bytes of a POST to /v1/batches
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
    receipts: bool = False


class BatchRoutes:
    """Handlers for one store. Records of other keys are treated as nonexistent."""

    def __init__(self, service: Service, batches: Batches) -> None:
        self._service = service
        self._batches = batches
        self._store = batches.store
        self._uploads: Counter[str] = Counter()

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
        limited = Request(request.scope, self._limited(request))
        with self._uploading(tenant_of(request)), room_on_disk():
            async with limited.form(max_files=1, max_fields=8, max_part_size=FORM_SLACK) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise invalid('no "file" in the form', "file")
                if purpose != "batch":
                    raise invalid(f'purpose must be "batch", not {purpose!r}', "purpose")
                if (file.size or 0) > self._service.settings.max_file_bytes:
                    raise self._too_large()
                record = FileRecord(
                    filename=(file.filename or "batch.jsonl")[:255],
                    purpose="batch",
                    tenant=tenant_of(request),
                    expires_at=_expiry(form),
                )
                await asyncio.to_thread(self._store.add_file, file.file, record)
        return JsonResponse(shown(record))

    @contextlib.contextmanager
    def _uploading(self, tenant: str) -> Iterator[None]:
        """Count a concurrent upload of a tenant. Raises ApiError if there are too many."""
        if self._uploads[tenant] >= UPLOADS:
            message = f"{UPLOADS} uploads are in progress; send this one when another is done"
            raise busy(message, code="too_many_uploads")
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1

    def _limited(self, request: Request) -> Callable[[], Awaitable[Message]]:
        """`receive` with limits on the size of the form and on the wait for each part."""
        settings, size = self._service.settings, 0

        async def receive() -> Message:
            nonlocal size
            try:
                message = await asyncio.wait_for(request.receive(), settings.body_timeout_s)
            except TimeoutError as error:
                late = "the file did not arrive in time; send it faster"
                raise ApiError(408, late, code="request_timeout", headers={"connection": "close"}) from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            if size > settings.max_file_bytes + FORM_SLACK:
                raise self._too_large()
            return message

        return receive

    def _too_large(self) -> ApiError:
        limit = self._service.settings.max_file_bytes
        return ApiError(413, f"the file has more than {limit} bytes; send it in parts", code="file_too_large")

    async def list_files(self, request: Request) -> Response:
        purpose, limit = request.query_params.get("purpose"), limit_of(request, 10_000, most=10_000)
        is_newest_first = request.query_params.get("order", "desc") != "asc"
        records = list(self._store.files.values())
        return await asyncio.to_thread(_page, request, records, limit, purpose, is_newest_first)

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
        return owned(self._store.files, request.path_params["id"], tenant_of(request), "file")

    async def create(self, request: Request) -> Response:
        service = self._service
        body = await service.bodies.typed(request, CreateBatch, MAX_BATCH_BODY)
        if service.refusing:
            raise busy("the server is shutting down", code="draining", status=503)
        if body.endpoint not in URLS:
            raise invalid(f"endpoint must be one of {', '.join(URLS)}, not {body.endpoint!r}", "endpoint")
        window = _WINDOW.fullmatch(body.completion_window)
        if window is None:
            message = (
                f'completion_window must be in hours or days, such as "24h", not {body.completion_window!r}'
            )
            raise invalid(message, "completion_window")
        try:
            check_labels({"metadata": body.metadata})
        except InvalidRequestError as error:
            raise invalid(str(error), "metadata") from error
        source = owned(self._store.files, body.input_file_id, tenant_of(request), "file")
        if source.purpose != "batch":
            raise invalid('the input must be a file of purpose "batch"', "input_file_id")
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
            tenant=tenant_of(request),
            results_id=new_id("file-"),
            errors_id=new_id("file-"),
            receipts_id=new_id("file-") if body.receipts else "",
            output_expires_s=_output_expiry(body.output_expires_after),
        )
        await asyncio.to_thread(self._store.add_batch, record)
        self._batches.wake()
        return JsonResponse(shown(record))

    async def list_batches(self, request: Request) -> Response:
        limit = limit_of(request, 20, most=MOST_BATCHES)
        return await asyncio.to_thread(_page, request, list(self._store.batches.values()), limit)

    async def batch(self, request: Request) -> Response:
        return JsonResponse(shown(self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        record = self._batch(request)
        if record.status not in UNFINISHED or record.status == "finalizing":
            message = f"cannot cancel a batch with status '{record.status}'; only an unfinished batch can be cancelled"
            raise ApiError(409, message, code="not_cancellable")
        if record.status != "cancelling":
            self._batches.cancel(record)
        return JsonResponse(shown(record))

    def _batch(self, request: Request) -> BatchRecord:
        return owned(self._store.batches, request.path_params["id"], tenant_of(request), "batch")


def _page(
    request: Request,
    records: Sequence[FileRecord | BatchRecord],
    limit: int,
    purpose: str | None = None,
    is_newest_first: bool = True,
) -> Response:
    """At most `limit` of the caller's records, from behind the one that a request names with `after`.

    There may be thousands, so this runs in a thread. purpose: of files; None for any.
    """
    tenant, after = tenant_of(request), request.query_params.get("after")
    rest = [
        each
        for each in records
        if each.tenant == tenant and (purpose is None or getattr(each, "purpose", None) == purpose)
    ]
    rest.sort(key=newest_last, reverse=is_newest_first)
    if after is not None:
        names = [each.id for each in rest]
        rest = rest[names.index(after) + 1 :] if after in names else []
    data = [shown(each) for each in rest[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = len(rest) > limit
    return JsonResponse(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
    )


def _expiry(form: Any) -> int | None:
    given = form.get("expires_after[seconds]")
    if given is None:
        return None
    seconds = number_of(given, _MOST_SECONDS) if isinstance(given, str) else None
    return int(time.time()) + _lifetime(seconds, "expires_after")


def _output_expiry(fields: dict[str, Any] | None) -> int | None:
    if fields is None:
        return None
    is_anchored = fields.get("anchor") == "created_at"
    return _lifetime(fields.get("seconds") if is_anchored else None, "output_expires_after")


def _lifetime(seconds: Any, param: str) -> int:
    if type(seconds) is not int or not 3600 <= seconds <= _MOST_SECONDS:
        raise invalid(
            f'{param} must have the anchor "created_at" and from 3600 to {_MOST_SECONDS} seconds', param
        )
    return seconds
