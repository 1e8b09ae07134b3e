"""The envelope of an OpenAI Batch line: everything around its body."""

from collections.abc import Mapping
from typing import Any

from xla_engine.batch.fields import BESIDE_BODY
from xla_engine.batch.pooling import POOLING_URLS
from xla_engine.errors import InvalidRequestError
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.json_line import kind

MAX_CUSTOM_ID = 512  # characters
COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
RESPONSES_URL = "/v1/responses"
URLS = (COMPLETIONS_URL, CHAT_URL, RESPONSES_URL, *POOLING_URLS)


def custom_id_in(record: Mapping[str, Any]) -> str | None:
    """The custom_id of a line; None if it has none. Raises InvalidRequestError."""
    if "custom_id" in record and "id" in record:
        raise InvalidRequestError('both "custom_id" and "id" given; keep one')
    value = record.get("custom_id", record.get("id"))
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"custom_id must be a non-empty string, not {value!r}")
    if len(value) > MAX_CUSTOM_ID:
        raise InvalidRequestError(f"custom_id has {len(value)} characters; at most {MAX_CUSTOM_ID}")
    return value


def envelope(record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The url of an OpenAI Batch line, and a copy of its body. Raises InvalidRequestError."""
    for name in record:
        if name not in BESIDE_BODY:
            hint = did_you_mean(name, BESIDE_BODY) or "; put sampling fields into the body"
            raise InvalidRequestError(f"unknown field {name!r} next to the body{hint}")
    method, url, body = record.get("method", "POST"), record.get("url"), record.get("body")
    if method != "POST":
        raise InvalidRequestError(f'method must be "POST", not {method!r}')
    if url is None:
        raise InvalidRequestError(f'no "url"; write "url": "{COMPLETIONS_URL}" or "{CHAT_URL}"')
    if url not in URLS:
        others = ", ".join(POOLING_URLS)
        raise InvalidRequestError(
            f"url {url!r} is not supported; {COMPLETIONS_URL}, {CHAT_URL} and {RESPONSES_URL} are (and {others} of "
            "models that pool)"
        )
    if not isinstance(body, dict):
        raise InvalidRequestError(f'"body" must be an object, not {kind(body)}')
    for name in ("custom_id", "id"):
        if name in body:
            raise InvalidRequestError(f"field {name!r} belongs next to the body, not into it")
    return url, dict(body)


def take_model(body: dict[str, Any]) -> str | None:
    """Remove the model's name from a body and return it. Raises InvalidRequestError."""
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model must be a string, not {model!r}")
    return model
