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
    "/v1/messages",
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
    *("suffix", "functions", "function_call", "system", "thinking", "stop_sequences", "output_config"),
    *("role", "content", "tool_calls", "arguments", "name", "type", "keep_alive"),
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
    {"type": "enabled", "budget_tokens": 5},
    [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search"}],
    [{"type": "custom", "name": "f"}],
    [
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": "x"},
    ],
    [
        {"type": "reasoning", "summary": [{"text": "x"}]},
        {"type": "function_call", "name": "f", "arguments": "{"},
    ],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "["}},
    ],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": [5]}}]}],
]
scalars = st.none() | st.booleans() | st.integers(-5, 40) | st.floats(allow_nan=False) | st.text(max_size=6)
values = st.sampled_from(GOOD) | st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


@pytest.mark.parametrize("path", default(PATHS, 5))
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
    if path == "/v1/messages":
        body = {"max_tokens": max_tokens, **body}
    if path == "/v1/responses":
        body = {"max_output_tokens": max_tokens, **body}
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code != 200 and path == "/v1/messages":
        assert answer.json()["type"] == "error" and set(answer.json()["error"]) == {"type", "message"}
    elif answer.status_code != 200:
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
