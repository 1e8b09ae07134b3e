"""Bodies of requests: read within limits of size, time and memory, and parsed as batch lines are, so that both give
the same bits."""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope

from xla_engine.openai.call import HttpCall
from xla_engine.openai.pooling import POOLING_URLS
from xla_engine.openai.requests import LineError, LineRequest, parse_record
from xla_engine.server.errors import ApiError, ClientGone, invalid, refused
from xla_engine.server.fairness import Shares
from xla_engine.server.settings import ServerSettings
from xla_engine.utils.digits import number_of
from xla_engine.utils.json_line import check_structure, load_object
from xla_engine.utils.shown import shown

BODIES = 16  # limit on all bodies being read or parsed, as a multiple of the largest body; half of it per key
# uncounted first bytes of each body, so that large bodies do not block ordinary requests
UNCOUNTED = 64 << 10
INLINE = 16 << 10  # bytes; a longer body is parsed in a background thread
# bytes; longer bodies have a thread of their own, so that ordinary requests do not wait for them
LONG = 256 << 10

T = TypeVar("T")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


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

        def in_thread() -> T:
            try:
                return parse()
            except Exception as error:
                _forget_frames(error)
                raise

        return await asyncio.get_running_loop().run_in_executor(self._threads[size > LONG], in_thread)

    async def typed(self, request: Request, kind: type[T], limit: int | None = None) -> T:
        """The body as a record of this type. limit: as in `whole`. Raises what `whole` raises, and ApiError."""

        def parse() -> T:
            try:
                check_structure(raw)
                return msgspec.json.decode(raw, type=kind)
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ApiError(400, f"the body is invalid: {error}", code="invalid_json") from error

        async with self.whole(request.scope, request.receive, limit) as raw:
            return await self.parsed(parse, len(raw))

    async def _read(self, scope: Scope, receive: Receive, limit: int, count: Callable[[int], None]) -> bytes:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is not None and (number_of(length.decode("latin-1"), limit) or 0) > limit:
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


def _forget_frames(error: BaseException | None) -> None:
    """Let go here of what the frames of an error and its causes hold; millions of parts would hold the loop up."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes; send less, or raise --max-body-bytes",
        code="request_too_large",
    )


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises ApiError."""
    try:
        return load_object(raw)
    except ValueError as error:
        message = str(error).replace("a line must be", "the body must be")
        raise ApiError(400, message, code="invalid_json") from error


def parse_call(
    body: Mapping[str, Any], url: str, defaults: Mapping[str, Any], model_names: Sequence[str]
) -> HttpCall:
    """Parse the body of a generation or pooling request. Raises ApiError, naming the field and the remedy.

    defaults: as in `parse_line`.
    """
    rest = dict(body)
    check_model(rest.get("model"), model_names)
    if url in POOLING_URLS:
        return HttpCall(request=_parsed(rest, url, defaults))
    stream = _flag(rest, "stream")
    token_ids = _flag(rest, "return_token_ids")
    options = rest.pop("stream_options", None)
    usage = {} if options is None else _stream_options(options, stream)
    if "best_of" in rest and rest["best_of"] == (rest.get("n") or 1):
        del rest["best_of"]
    return HttpCall(
        request=_parsed(rest, url, defaults),
        stream=stream,
        include_usage=usage.get("include_usage", False),
        continuous_usage=usage.get("continuous_usage_stats", False),
        return_token_ids=token_ids,
    )


def _parsed(body: Mapping[str, Any], url: str, defaults: Mapping[str, Any]) -> LineRequest:
    request = parse_record({"method": "POST", "url": url, "body": body}, 1, defaults)
    if isinstance(request, LineError):
        raise refused(request, body)
    return request


def check_model(name: object, names: Sequence[str]) -> None:
    """Raise ApiError unless the name is one of `names`, or None."""
    if isinstance(name, str) and name not in names:
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist; this server has {', '.join(names)}",
            code="model_not_found",
            param="model",
        )


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, not {shown(value)}", name)
    return value


def _stream_options(options: object, stream: bool) -> dict[str, bool]:
    name = "stream_options"
    if not stream:
        raise invalid(f"{name} needs stream: true", name)
    if not isinstance(options, dict):
        raise invalid(f"{name} must be an object, not {shown(options)}", name)
    for key, value in options.items():
        if key == "include_obfuscation":
            continue  # padding against traffic analysis; it makes no difference to the client
        if key not in STREAM_OPTIONS or not isinstance(value, bool | None):
            allowed = " and ".join(STREAM_OPTIONS)
            message = f"{name} may hold {allowed}, true or false; not {shown(key)}: {shown(value)}"
            raise invalid(message, name)
    wanted = bool(options.get("include_usage"))  # continuous usage needs it, too
    return {key: wanted and bool(options.get(key)) for key in STREAM_OPTIONS}
