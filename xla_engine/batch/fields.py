"""The fields of a line that are no sampling fields, and what OpenAI's bodies spell out without asking for anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import UNSUPPORTED, SamplingParams
from xla_engine.text.parsers.chats import TEMPLATE_FIELDS

# OpenAI bodies spell out defaults: an unsupported field may be there with the value that asks for nothing.
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
    "spaces_between_special_tokens": True,
    "audio": None,
    "prediction": None,
    "reasoning_effort": None,
    "web_search_options": None,
}
# For the caller's own use, for a service's accounts and caches, or for streams: they change no token.
LABELS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
SUBMIT_FIELDS = ("priority", "quantum", "deadline_s", "queue_timeout_s", "cache_salt")
BESIDE_BODY = ("custom_id", "id", "method", "url", "body")
LINE_FIELDS = frozenset(
    {
        *BESIDE_BODY,
        *SUBMIT_FIELDS,
        *TEMPLATE_FIELDS,
        "echo",
        "max_completion_tokens",
        "messages",
        "model",
        "prompt",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "tools",
    }
)

_KNOWN = {entry.name for entry in fields(SamplingParams)}.union(UNSUPPORTED, NEUTRAL, LABELS, SUBMIT_FIELDS)


def without_neutral(sampling: Mapping[str, Any], *, nulls: bool) -> dict[str, Any]:
    """Sampling fields without those that ask for nothing: labels, and defaults of fields that are not supported.

    nulls: leave out a null of any known field, too, which in OpenAI's bodies stands for the default.
    """

    def asks_for_nothing(name: str, value: object) -> bool:
        if value is None:
            return nulls and name in _KNOWN
        neutral = NEUTRAL.get(name)
        return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)

    return {
        name: value
        for name, value in sampling.items()
        if name not in LABELS and not asks_for_nothing(name, value)
    }


def take_cap(body: dict[str, Any]) -> None:
    """Write OpenAI's newer name of `max_tokens` as the older one."""
    most = body.pop("max_completion_tokens", None)
    if most is not None:
        if body.get("max_tokens") is not None:
            raise InvalidRequestError("both max_tokens and max_completion_tokens given; keep one")
        body["max_tokens"] = most


def take_echo(body: dict[str, Any]) -> tuple[bool, bool]:
    """Take `echo` out of a body: whether the prompt is part of the answer, and whether something is generated.

    A prompt to be scored and not continued (`max_tokens` 0) gets one token, which the answer leaves out. With
    `logprobs` the prompt's are asked for.
    """
    echo = body.pop("echo", None)
    if not isinstance(echo, bool | None):
        raise InvalidRequestError(f"echo must be true or false, not {echo!r}")
    if not echo:
        return False, True
    if body.get("logprobs") is not None:
        if body.get("prompt_logprobs") is not None:
            raise InvalidRequestError("echo with logprobs has the prompt's logprobs; remove prompt_logprobs")
        body["prompt_logprobs"] = body["logprobs"]
    if body.get("max_tokens") != 0 or isinstance(body["max_tokens"], bool):
        return True, True
    body["max_tokens"] = 1
    return True, False
