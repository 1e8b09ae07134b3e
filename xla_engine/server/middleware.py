"""Middleware for every request: its id, API keys, errors and access log.

It is pure ASGI, so that endpoints see when a client disconnects (Starlette's BaseHTTPMiddleware hides it).
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xla_engine.server.errors import ApiError, ClientGone
from xla_engine.server.generation import cut_off, send_json
from xla_engine.server.service import RequestTimes
from xla_engine.server.turns import PART_BYTES

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/version", "/metrics"})  # no key needed
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Prefixes of paths that contain a name.
_FAMILIES = ("/v1/files/", "/v1/batches/", "/v1/models/", "/v1/responses/")
_UNEXPECTED = ApiError(500, "the server failed on this request; see its log", code="internal_error")

access_log = logging.getLogger("xla_engine.server.access")


class RequestContext:
    """Gives each request an id, adds it to the answer's headers, and counts and logs the answer.

    Answers are sent in parts. A client that does not read one in time is disconnected.

    paths: label values of the answer counter. All other paths share one label, so that clients cannot create labels.
    send_timeout_s: time for a client to read a part of an answer.
    """

    def __init__(
        self, app: ASGIApp, times: RequestTimes, paths: frozenset[str], send_timeout_s: float
    ) -> None:
        self._app = app
        self._times = times
        self._paths = paths
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})
        began, status = time.perf_counter(), 499

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await self._send(send, message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientGone:
            status = 499
            cut_off(scope)
            await asyncio.sleep(0)  # let the connection notice
        finally:
            path = scope["path"]
            family = next((family for family in _FAMILIES if path.startswith(family)), "other")
            counted = path if path in self._paths else family
            self._times.responses[counted, str(status)] += 1
            if access_log.isEnabledFor(logging.INFO):
                milliseconds = 1e3 * (time.perf_counter() - began)
                access_log.info(
                    "%s %r %d %.1f ms id=%s",
                    scope["method"],
                    scope["path"][:200],
                    status,
                    milliseconds,
                    request_id.decode(),
                )

    async def _send(self, send: Send, message: Message) -> None:
        """Send a message, whose body may be large. Raises ClientGone if the client does not read it."""
        body, more = message.get("body", b""), message.get("more_body", False)
        parts = range(0, max(len(body), 1), PART_BYTES)
        try:
            for begin in parts:
                if len(parts) > 1:
                    part = body[begin : begin + PART_BYTES]
                    message = {**message, "body": part, "more_body": more or begin != parts[-1]}
                async with asyncio.timeout(self._send_timeout_s):
                    await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone("it takes nothing") from error


class ApiErrors:
    """Turns errors raised below it into answers, to which middleware above it adds headers.

    An unexpected error becomes an answer with status 500 and is raised again, for the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ApiError as error:
            await send_json(send, error.status, error.json(scope["path"]), error.headers)
        except ClientGone:
            raise
        except Exception:
            if scope["type"] == "http" and not begun:
                await send_json(send, 500, _UNEXPECTED.json(scope["path"]))
            raise


def tenant_of(request: Request) -> str:
    """The caller's tenant, as `ApiKeys` has found it; empty without keys."""
    return str(request.scope["state"].get("tenant", ""))


class ApiKeys:
    """Rejects requests without a valid key. The key's hash is the tenant, whose files and prefixes a request can use.

    Compares with every key in constant time, so that timing reveals nothing about them.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})
            scope["state"]["tenant"] = ""
            if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                if self._digests:
                    scope["state"]["tenant"] = self._tenant(scope)
                if (key_found := scope["state"].get("key_found")) is not None:
                    key_found()
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        for given in map(hashlib.sha256, _given_keys(scope)):
            if True in [hmac.compare_digest(given.digest(), digest) for digest in self._digests]:
                return given.hexdigest()[:16]
        raise ApiError(
            401,
            "no valid API key; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _given_keys(scope: Scope) -> list[bytes]:
    """The keys that a request gives: one as OpenAI's clients do, and one as Anthropic's do."""
    headers = dict(reversed(scope["headers"]))  # of several of one name the first
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    found = [key.strip()] if scheme.lower() == b"bearer" else []
    return [*found, headers[b"x-api-key"].strip()] if b"x-api-key" in headers else found
