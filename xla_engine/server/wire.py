"""Parse the body of a POST with the parser of batch lines, so that both give the same bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from xla_engine.batch.pooling import POOLING_URLS
from xla_engine.batch.requests import LineError, LineRequest, parse_record
from xla_engine.server.errors import ApiError, invalid, refused
from xla_engine.text.parsers.scan import Parser
from xla_engine.utils.json_line import check_structure, load_object

T = TypeVar("T")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed POST.

    request: the request of a batch line with this body.
    stream: answer in chunks. include_usage: the last chunk has the token usage; continuous_usage: each chunk has it.
    return_token_ids: the answer has the token ids of prompt and completion.
    """

    request: LineRequest
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False

    def parser(self, *, thinking: bool) -> Parser | None:
        """A parser for one choice of a chat; None if its whole text is content."""
        reading = self.request.reading
        return None if reading is None else reading.parser(thinking=thinking)

    @property
    def sequences(self) -> int:
        """Number of choices in the answer."""
        return len(self.request.prompts) * self.request.params.n


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises ApiError."""
    try:
        return load_object(raw)
    except ValueError as error:
        message = str(error).replace("a line must be", "the body must be")
        raise ApiError(400, message, code="invalid_json") from error


def typed_body(raw: bytes, kind: type[T]) -> T:
    """Parse a body as a record of this type. Raises ApiError."""
    try:
        check_structure(raw)
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"the body is invalid: {error}", code="invalid_json") from error


def parse_call(
    body: Mapping[str, Any], url: str, defaults: Mapping[str, Any], model_names: Sequence[str]
) -> Call:
    """Parse the body of a generation or pooling request. Raises ApiError, naming the field and the remedy.

    defaults: as in `parse_line`.
    """
    rest = dict(body)
    check_model(rest.get("model"), model_names)
    if url in POOLING_URLS:
        return Call(request=_parsed(rest, url, defaults))
    stream = _flag(rest, "stream")
    token_ids = _flag(rest, "return_token_ids")
    options = rest.pop("stream_options", None)
    usage = {} if options is None else _stream_options(options, stream)
    if "best_of" in rest and rest["best_of"] == (rest.get("n") or 1):
        del rest["best_of"]
    return Call(
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
            f"the model {name!r} does not exist; this server has {', '.join(names)}",
            code="model_not_found",
            param="model",
        )


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, not {value!r}", name)
    return value


def _stream_options(options: object, stream: bool) -> dict[str, bool]:
    name = "stream_options"
    if not stream:
        raise invalid(f"{name} needs stream: true", name)
    if not isinstance(options, dict):
        raise invalid(f"{name} must be an object, not {options!r}", name)
    for key, value in options.items():
        if key == "include_obfuscation":
            continue  # padding against traffic analysis; it makes no difference to the client
        if key not in STREAM_OPTIONS or not isinstance(value, bool | None):
            message = f"{name} may hold {' and '.join(STREAM_OPTIONS)}, true or false; not {key!r}: {value!r}"
            raise invalid(message, name)
    wanted = bool(options.get("include_usage"))  # continuous usage needs it, too
    return {key: wanted and bool(options.get(key)) for key in STREAM_OPTIONS}
