"""Reading the body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from xla_engine.server.errors import ApiError, ClientGone
from xla_engine.server.settings import ServerSettings

BODIES = 8  # times the largest body: bytes of all bodies that are being read

_CLOSE = {"connection": "close"}  # what is left of the body is not read


class BodyBudget:
    """Bytes of bodies that are being read, over all connections."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


async def read_body(scope: Scope, receive: Receive, settings: ServerSettings, budget: BodyBudget) -> bytes:
    """The whole body. Raises ApiError where it is too large, too slow, or one too many; ClientGone."""
    limit = settings.max_body_bytes
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    if length is not None and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part: bytes = message.get("body", b"")
                size += len(part)
                budget.held += len(part)
                if size > limit:
                    raise _too_large(limit)
                if budget.held > budget.limit:
                    raise ApiError(
                        429,
                        "too many large requests are being read; send this one again",
                        code="too_many_bodies",
                        headers={"retry-after": "1", **_CLOSE},
                    )
                parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError as error:
        message_text = f"the body did not come within {settings.body_timeout_s:g} s; send it faster"
        raise ApiError(408, message_text, code="request_timeout", headers=_CLOSE) from error
    finally:
        budget.held -= size
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes; send less, or raise --max-body-bytes",
        code="request_too_large",
        headers=_CLOSE,
    )
