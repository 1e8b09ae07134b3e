"""Any body gets a result or an error in OpenAI's form, never a 5xx, and leaves no request behind."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.tiers import default

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/batches",
]
FIELDS = [
    *(
        "prompt",
        "messages",
        "input",
        "model",
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "stop",
    ),
    *(
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "tools",
        "tool_choice",
        "response_format",
        "logit_bias",
        "tokens",
    ),
    *(
        "priority",
        "deadline_s",
        "cache_salt",
        "text",
        "reasoning",
        "instructions",
        "chat_template_kwargs",
        "echo",
    ),
    *("input_file_id", "endpoint", "completion_window", "metadata", "reasoning_effort", "structured_outputs"),
]
GOOD: list[Any] = [
    "x",
    "embedded",
    [5, 6],
    ["x"],
    [{"role": "user", "content": "x"}],
    {"type": "json_object"},
    {"type": "text"},
    "required",
    [{"type": "function", "function": {"name": "f"}}],
    {"include_usage": True},
    {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    {"regex": "a|b"},
]
scalars = st.none() | st.booleans() | st.integers(-5, 40) | st.floats(allow_nan=False) | st.text(max_size=6)
values = st.sampled_from(GOOD) | st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


@pytest.mark.parametrize("path", default(PATHS, 4))
@given(body=bodies, max_tokens=st.integers(1, 4))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_body_is_answered_with_a_server_error(
    http: httpx.Client, path: str, body: dict[str, Any], max_tokens: int
) -> None:
    if path.startswith("/v1/c"):
        body = {"max_tokens": max_tokens, **body}
    if path == "/v1/responses":
        body = {"max_output_tokens": max_tokens, **body}
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@given(raw=st.binary(max_size=64))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_bytes_are_answered_with_a_server_error(http: httpx.Client, raw: bytes) -> None:
    for path in PATHS:
        assert http.post(path, content=raw).status_code == 400
    assert http.post("/v1/files", content=raw, headers={"content-type": "multipart/form-data; boundary=x"})
    assert http.post("/v1/files", content=raw).status_code == 400
