"""Read and parse request bodies within limits of size, time and memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive, Scope

from xla_engine.server.errors import ApiError, ClientGone
from xla_engine.server.fairness import Shares
from xla_engine.server.settings import ServerSettings

BODIES = 16  # limit on all bodies being read or parsed, as a multiple of the largest body; half of it per key
# uncounted first bytes of each body, so that large bodies do not block ordinary requests
UNCOUNTED = 64 << 10
INLINE = 16 << 10  # bytes; a longer body is parsed in a background thread
# bytes; longer bodies have a thread of their own, so that ordinary requests do not wait for them
LONG = 256 << 10

T = TypeVar("T")


class Bodies:
    """Reads and parses the bodies of one server's requests."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.shares = Shares(  # bytes
            BODIES * settings.max_body_bytes,
            "too many large requests are being read; send this one again",
            code="too_many_bodies",
        )
        self._threads = {
            is_long: ThreadPoolExecutor(1, thread_name_prefix="parse") for is_long in (False, True)
        }

    @contextlib.asynccontextmanager
    async def whole(self, scope: Scope, receive: Receive, limit: int | None = None) -> AsyncIterator[bytes]:
        """The whole body, which counts towards the limits within the context. limit: bytes; by default the settings'.

        Raises ClientGone, and ApiError if the body is too large or too slow, or if too many bodies are held.
        """
        counted = 0
        key = scope["state"].get("tenant", "")

        def count(size: int) -> None:
            nonlocal counted
            more = max(size - UNCOUNTED, 0) - counted
            self.shares.take(more, key)
            counted += more

        try:
            yield await self._read(scope, receive, limit or self._settings.max_body_bytes, count)
        finally:
            self.shares.give_back(counted, key)

    async def parsed(self, parse: Callable[[], T], size: int) -> T:
        """Call `parse` for a body of `size` bytes: in a background thread, unless the body is small."""
        if size <= INLINE:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._threads[size > LONG], parse)

    async def _read(self, scope: Scope, receive: Receive, limit: int, count: Callable[[int], None]) -> bytes:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is not None and length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    count(size)
                    more = message.get("more_body", False)
        except TimeoutError as error:
            late = f"the body did not arrive within {self._settings.body_timeout_s:g} s; send it faster"
            raise ApiError(408, late, code="request_timeout", headers={"connection": "close"}) from error
        return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes; send less, or raise --max-body-bytes",
        code="request_too_large",
    )
