"""Errors in OpenAI's format."""

from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.openai.requests import MAX_MESSAGE, LineError, explain
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError

# Codes of the engine that have another name here.
_CODES = {"token_limit_exceeded": "context_length_exceeded", "invalid_json_line": "invalid_json"}
_FIELDS = frozenset(
    {entry.name for entry in fields(SamplingParams)}
    | {"prompt", "messages", "suffix", "priority", "quantum", "deadline_s", "queue_timeout_s", "cache_salt"}
)
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES_URL = "/v1/messages"  # whose errors have Anthropic's form
_OTHER_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STATUS_OF_END = {"deadline": 408, "queue_timeout": 503, "aborted": 499}


class ApiError(Exception):
    """An error answer.

    status: of HTTP. code: for programs. param: the wrong field of the request, if any.
    headers: additional ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 4] + " ..."
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's name for the class of error (`type`)."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def json(self, path: str = "") -> bytes:
        """The error as JSON, in the form of this path's answers."""
        found = in_other_form(self.status, self.message) if path.startswith(MESSAGES_URL) else self.body()
        return msgspec.json.encode(found)


def in_other_form(status: int, message: str) -> dict[str, Any]:
    """An error in Anthropic's form."""
    name = _OTHER_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": name, "message": message}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """The answer to a request with a wrong field."""
    return ApiError(400, message, code="invalid_request", param=param)


def busy(message: str, *, code: str = "queue_full", seconds: int = 1, status: int = 429) -> ApiError:
    """The answer to a request that may be sent again after some seconds."""
    return ApiError(status, message, code=code, headers={"retry-after": str(seconds)})


def api_error(error: Exception) -> ApiError:
    """The answer for an exception of the engine or a parser."""
    if isinstance(error, ApiError):
        return error
    code, message = explain(error)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, message, code=_CODES.get(code, code), param=_field(message, _FIELDS))
    if isinstance(error, QueueFullError):
        return busy(str(error))
    if isinstance(error, EngineClosedError):
        return ApiError(503, message, code=code)
    return ApiError(500, message, code="internal_error")


def refused(error: LineError, body: Mapping[str, Any]) -> ApiError:
    """The answer to a body that the parser rejected."""
    code = _CODES.get(error.code, error.code)
    return ApiError(400, error.message, code=code, param=_field(error.message, body))


def ended(error: LineError) -> ApiError:
    """The answer to a request that ended without a result."""
    # an invalid constraint, or one whose masks take too long
    if error.message.startswith("structured_outputs"):
        return invalid(error.message, "structured_outputs")
    return ApiError(_STATUS_OF_END.get(error.code, 500), error.message, code=error.code)


class ClientGone(Exception):
    """The client disconnected or does not read its answer, so no answer can be sent."""


def _field(message: str, names: Container[str]) -> str | None:
    """The first word of a message that is one of these names."""
    words = message.replace("'", " ").replace('"', " ").replace(":", " ").split()
    return next((word for word in words if word in names), None)
