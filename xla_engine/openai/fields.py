"""Fields of a request that are not sampling parameters: an OpenAI Batch line's envelope, no-op defaults, labels, and
other names of fields."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.openai.pooling import POOLING_URLS
from xla_engine.sampling_params import UNSUPPORTED, SamplingParams
from xla_engine.text.parsers.chats import HINTS, TEMPLATE_FIELDS
from xla_engine.utils.did_you_mean import did_you_mean
from xla_engine.utils.json_line import kind
from xla_engine.utils.shown import shown
from xla_engine.utils.warn_once import warn_once

# OpenAI bodies spell out defaults, so an unsupported field is accepted if its value has no effect.
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream": False,
    "stop": [],
    "tools": [],
    "functions": [],
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "length_penalty": 1,
    "tool_choice": "none",
    "function_call": "none",
    "verbosity": "medium",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "use_beam_search": False,
    "include_reasoning": True,
    "spaces_between_special_tokens": True,
    "audio": None,
    "reasoning_effort": None,
    "web_search_options": None,
}
# Fields for the caller's own use, for a service's accounts and caches, or for streams. They change no token.
LABELS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
# Fields of other servers that change no token here. The log names each once.
IGNORED = frozenset(
    {
        *("cache_prompt", "client_metadata", "id_slot", "keep_alive", "n_keep", "num_gpu", "num_thread"),
        *("return_progress", "slot_id", "timings_per_token", "use_mlock", "use_mmap"),
    }
)
# Names that other servers have for our fields, and what to write.
OTHER_NAMES: Mapping[str, str] = {
    "do_sample": "temperature",
    "format": "response_format",
    "json_schema": 'response_format or structured_outputs {"json": ...}',
    "grammar": 'structured_outputs {"grammar": ...}',
    "max_new_tokens": "max_tokens",
    "maxTokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_ctx": "--max-model-len of the server",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "options": "the fields of options themselves, outside of it",
    "regex": 'structured_outputs {"regex": ...}',
    "repeat_penalty": "repetition_penalty",
    "return_tokens": "return_token_ids",
    "stop_sequences": "stop",
    "think": 'chat_template_kwargs {"enable_thinking": ...}',
}
_TEXT_LABELS = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
MAX_LABEL = 512  # characters of one of these, and of a value of metadata, as at OpenAI
MAX_METADATA = 16  # pairs
MAX_METADATA_KEY = 64  # characters
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")
_GUIDED = tuple(f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar"))  # vLLM's older names
SUBMIT_FIELDS = ("priority", "quantum", "deadline_s", "queue_timeout_s", "cache_salt")
BESIDE_BODY = ("custom_id", "id", "method", "url", "body")
LINE_FIELDS = frozenset(
    {
        *BESIDE_BODY,
        *SUBMIT_FIELDS,
        *TEMPLATE_FIELDS,
        *HINTS,
        *_GUIDED,
        "echo",
        "images",
        "max_completion_tokens",
        "messages",
        "model",
        "prompt",
        "response_format",
        "suffix",
        "tool_choice",
        "tools",
    }
)

_KNOWN = {entry.name for entry in fields(SamplingParams)}.union(UNSUPPORTED, NEUTRAL, LABELS, SUBMIT_FIELDS)

MAX_CUSTOM_ID = 512  # characters
COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
RESPONSES_URL = "/v1/responses"
URLS = (COMPLETIONS_URL, CHAT_URL, RESPONSES_URL, *POOLING_URLS)


def without_gaps(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line without known fields that are null. pandas, for one, writes all columns of a table into every line."""
    return {
        name: value
        for name, value in record.items()
        if value is not None or not (name in LINE_FIELDS or name in _KNOWN)
    }


def without_neutral(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that have no effect: labels, nulls of known fields, and unsupported fields with their default
    values."""

    def asks_for_nothing(name: str, value: object) -> bool:
        if value is None:
            return name in _KNOWN
        neutral = NEUTRAL.get(name)
        return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)

    return {
        name: value
        for name, value in sampling.items()
        if name not in LABELS and not asks_for_nothing(name, value)
    }


def check_labels(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError unless labels have OpenAI's types and sizes. (Answers and lists repeat some of
    them.)"""
    metadata = body.get("metadata")
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise InvalidRequestError(f"metadata must be an object, not {kind(metadata)}")
        if len(metadata) > MAX_METADATA:
            raise InvalidRequestError(
                f"metadata has {len(metadata)} pairs; at most {MAX_METADATA} are allowed"
            )
        for name, value in metadata.items():
            if not isinstance(value, str):
                raise InvalidRequestError(f"metadata contains {kind(value)}; its values must be strings")
            if len(name) > MAX_METADATA_KEY or len(value) > MAX_LABEL:
                raise InvalidRequestError(
                    f"metadata may have names of {MAX_METADATA_KEY} characters and values of {MAX_LABEL}; shorten it"
                )
    for label in _TEXT_LABELS:
        value = body.get(label)
        if not isinstance(value, str | None):
            raise InvalidRequestError(f"{label} must be a string, not {kind(value)}")
        if len(value or "") > MAX_LABEL:
            raise InvalidRequestError(f"{label} has more than {MAX_LABEL} characters; shorten it")
    for label in ("parallel_tool_calls", "store"):
        if not isinstance(value := body.get(label), bool | None):
            raise InvalidRequestError(f"{label} must be true or false, not {kind(value)}")
    prediction = body.get("prediction")  # a predicted output; it changes no token
    if prediction is not None and not (isinstance(prediction, dict) and prediction.get("type") == "content"):
        raise InvalidRequestError('prediction must be an object with the type "content"')
    if (tier := body.get("service_tier")) is not None and tier not in _SERVICE_TIERS:
        raise InvalidRequestError(f"service_tier must be one of {', '.join(_SERVICE_TIERS)}")


def rename_others(body: dict[str, Any]) -> None:
    """Turn `max_completion_tokens` into `max_tokens`, and vLLM's older `guided_json` and the like into
    `structured_outputs`, and drop what changes no token. Raises InvalidRequestError, which tells the right name of a
    field that has another here."""
    for name in [name for name in body if name in IGNORED]:
        del body[name]
        warn_once("fields named %r are ignored: they change no token here", name)
    for name, ours in OTHER_NAMES.items():
        if body.get(name) is not None:
            raise InvalidRequestError(f"{name} is not a field of this server; write {ours}")
    most = body.pop("max_completion_tokens", None)
    if most is not None:
        if body.get("max_tokens") is not None:
            raise InvalidRequestError("both max_tokens and max_completion_tokens given; keep one")
        body["max_tokens"] = most
    for name in _GUIDED:
        if (value := body.pop(name, None)) is not None:
            if body.get("structured_outputs") is not None:
                raise InvalidRequestError(f"{name} and another constraint given; keep one")
            body["structured_outputs"] = {name.removeprefix("guided_"): value}


def take_echo(body: dict[str, Any]) -> tuple[bool, bool]:
    """Remove `echo` from a body. Returns whether the answer includes the prompt, and whether tokens are generated.

    With `max_tokens` 0 the prompt is only scored: one token is generated and left out of the answer. With
    `logprobs`, prompt logprobs are requested too.
    """
    echo = body.pop("echo", None)
    if not isinstance(echo, bool | None):
        raise InvalidRequestError(f"echo must be true or false, not {shown(echo)}")
    if not echo:
        return False, True
    if body.get("logprobs") is not None:
        if body.get("prompt_logprobs") is not None:
            raise InvalidRequestError(
                "echo with logprobs already returns the prompt's logprobs; remove prompt_logprobs"
            )
        body["prompt_logprobs"] = body["logprobs"]
    if body.get("max_tokens") != 0 or isinstance(body["max_tokens"], bool):
        return True, True
    body["max_tokens"] = 1
    return True, False


def custom_id_in(record: Mapping[str, Any]) -> str | None:
    """The custom_id of a line; None if it has none. Raises InvalidRequestError."""
    if "custom_id" in record and "id" in record:
        raise InvalidRequestError('both "custom_id" and "id" given; keep one')
    value = record.get("custom_id", record.get("id"))
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"custom_id must be a non-empty string, not {shown(value)}")
    if len(value) > MAX_CUSTOM_ID:
        raise InvalidRequestError(f"custom_id has {len(value)} characters; at most {MAX_CUSTOM_ID}")
    return value


def envelope(record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The url of an OpenAI Batch line, and a copy of its body. Raises InvalidRequestError."""
    for name in record:
        if name not in BESIDE_BODY:
            hint = did_you_mean(name, BESIDE_BODY) or "; put sampling fields into the body"
            raise InvalidRequestError(f"unknown field {shown(name)} next to the body{hint}")
    method, url, body = record.get("method", "POST"), record.get("url"), record.get("body")
    if method != "POST":
        raise InvalidRequestError(f'method must be "POST", not {shown(method)}')
    if url is None:
        raise InvalidRequestError(f'no "url"; write "url": "{COMPLETIONS_URL}" or "{CHAT_URL}"')
    if url not in URLS:
        others = ", ".join(POOLING_URLS)
        raise InvalidRequestError(
            f"url {shown(url)} is not supported; {COMPLETIONS_URL}, {CHAT_URL} and {RESPONSES_URL} are (and "
            f"{others} of models that pool)"
        )
    if not isinstance(body, dict):
        raise InvalidRequestError(f'"body" must be an object, not {kind(body)}')
    for name in ("custom_id", "id"):
        if name in body:
            raise InvalidRequestError(f"field {shown(name)} belongs next to the body, not into it")
    return url, dict(body)


def take_model(body: dict[str, Any]) -> str | None:
    """Remove the model's name from a body and return it. Raises InvalidRequestError."""
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model must be a string, not {shown(model)}")
    return model
