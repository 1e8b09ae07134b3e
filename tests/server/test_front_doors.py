"""What people try first: other servers' paths and fields, and prompts with a gap."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
import tokenizers

from tests.server.conftest import Running
from xla_engine.errors import InvalidRequestError
from xla_engine.openai.fields import IGNORED, OTHER_NAMES
from xla_engine.openai.requests import LineRequest, parse_record
from xla_engine.text.fill_in import _NAMES, _SUFFIX_FIRST, FillIn, fill_in_ids, fill_in_tokens
from xla_engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("method", "path", "ours"),
    [
        ("GET", "/props", "GET /v1/models"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("GET", "/api/version", "GET /version"),
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions"),
        ("GET", "/models", "did you mean /v1/models"),
        ("GET", "/nothing", "OpenAI's API under /v1"),
    ],
)
def test_an_unknown_path_says_what_to_use(http: httpx.Client, method: str, path: str, ours: str) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404 and ours in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_fields_of_other_servers_are_ignored_or_named(http: httpx.Client, path: str) -> None:
    """One rule for all: what changes no token is ignored, and the log says so; the rest is refused with our name."""
    ask: dict[str, Any] = {"temperature": 0, "prompt": "def f"}
    if path != "/v1/completions":
        ask = {"temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        ask = {"temperature": 0, "input": "hi", "max_output_tokens": 2}
    else:
        ask["max_tokens"] = 2
    assert http.post(path, json=ask | dict.fromkeys(IGNORED, 5)).status_code == 200
    for name, ours in OTHER_NAMES.items():
        if (path, name) == ("/v1/messages", "stop_sequences"):
            continue  # which is its name there
        answer = http.post(path, json={**ask, name: 5})
        assert answer.status_code == 400, name
        message = answer.json()["error"]["message"]
        assert name in message and ours in message


def test_the_log_names_an_ignored_field_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xla_engine.utils.warn_once._warned", set())
    for _ in range(3):
        body = {"prompt": "x", "keep_alive": "5m", "cache_prompt": True}
        request = parse_record({"method": "POST", "url": "/v1/completions", "body": body}, 1)
        assert isinstance(request, LineRequest)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert sorted(told) == [
        "fields named 'cache_prompt' are ignored: they change no token here",
        "fields named 'keep_alive' are ignored: they change no token here",
    ]


# -- suffix ------------------------------------------------------------------------------------------------


def gapped(names: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of characters with these tokens."""
    vocabulary = {text: number for number, text in enumerate(["<s>", *"abcdef ", "<|endoftext|>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.add_special_tokens(["<s>", "<|endoftext|>", *names])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(backend)


@pytest.mark.parametrize("names", [*_NAMES, _SUFFIX_FIRST])
def test_a_gap_is_told_by_the_models_own_tokens(names: tuple[str, ...]) -> None:
    tokenizer = gapped(names)
    told = [tokenizer.token_string(each) for each in fill_in_ids(FillIn("ab", "c d"), tokenizer)]
    prefix, suffix, *middle = names
    if middle:
        assert told == ["<s>", prefix, "a", "b", suffix, "c", " ", "d", *middle]
    else:
        assert told == ["<s>", prefix, "c", " ", "d", suffix, "a", "b"]
    ends = {tokenizer.token_string(each) for each in fill_in_tokens(tokenizer).ends}
    assert ends == {*names, "<|endoftext|>"}
    assert fill_in_ids(FillIn("", "c"), tokenizer, add_special_tokens=False)[0] != 0


def test_a_model_without_such_tokens_says_so(http: httpx.Client) -> None:
    with pytest.raises(InvalidRequestError, match="no fill-in-the-middle tokens"):
        fill_in_tokens(gapped(()))
    for fields in ({"suffix": "\n"}, {"suffix": "x" * 10000}, {"suffix": "x", "prompt": ["a", "b"]}):
        answer = http.post("/v1/completions", json={"prompt": "def f", **fields})
        assert (
            answer.status_code == 400 and "no fill-in-the-middle tokens" in answer.json()["error"]["message"]
        )
    for fields in ({"suffix": 5}, {"suffix": "x", "echo": True}, {"suffix": "x", "prompt": [1, 2]}):
        answer = http.post("/v1/completions", json={"prompt": "def f", **fields})
        assert answer.status_code == 400 and "suffix" in answer.json()["error"]["message"]
    for none in ("", None):
        assert (
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "suffix": none}).status_code
            == 200
        )


def test_a_gap_is_a_prompt_of_token_ids(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three tokens of the embedded model in place of its own: the same answer, short texts and long ones."""
    tokenizer = server.service.engine.tokenizer
    assert tokenizer is not None
    ids = {name: tokenizer.encode(text)[0] for name, text in zip(_NAMES[0], "#@!", strict=True)}
    monkeypatch.setattr(type(tokenizer), "id_of", lambda _, name: ids.get(name))
    fill_in_tokens.cache_clear()
    try:
        for before, after in (("def f(", "return 1"), ("", "x"), ("a = 1\n" * 10, "b = 2\n" * 2000)):
            body = {"prompt": before, "suffix": after, "max_tokens": 6, "temperature": 0}
            found = http.post("/v1/completions", json=body).json()
            if len(after) > 1000:
                assert "max_model_len" in found["error"]["message"]
                continue
            prompt = list(fill_in_ids(FillIn(before, after), tokenizer))
            stops = {"stop_token_ids": list(fill_in_tokens(tokenizer).ends)}
            plain = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **stops}
            expected = http.post("/v1/completions", json=plain).json()
            assert found["choices"][0]["text"] == expected["choices"][0]["text"]
            assert found["usage"]["prompt_tokens"] == len(prompt)
    finally:
        fill_in_tokens.cache_clear()
