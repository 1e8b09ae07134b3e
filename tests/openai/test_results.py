"""Result and error lines: OpenAI's client can read them, every line is one line for every reader, and ids can be read
back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.batch_lines import batch, finished, parsed, talk
from xla_engine.batch.record_ids import line_digest, parse_record_id, record_id
from xla_engine.openai.requests import line_error
from xla_engine.openai.results import ResultHeader, error_line, output_error, result_line
from xla_engine.outputs import Logprob, RequestOutput
from xla_engine.text.detokenizer import _BYTE_OF, ByteLevelDetokenizer, TokenBytes

HEADER = ResultHeader(created=1700000000, model="theirs", system_fingerprint="f" * 16)
CHAT = talk(logprobs=True)
TEXT = batch({"model": "mine", "prompt": "x", "logprobs": 0})


def body_of(raw: bytes, *outputs: Any, header: ResultHeader = HEADER) -> dict[str, Any]:
    line = result_line(parsed(raw), list(outputs), record_id(7, 1), header)
    body: dict[str, Any] = json.loads(line)["response"]["body"]
    return body


def test_result_line_is_openai_batch_output() -> None:
    output = finished(logprobs=(-0.5, -1.25), finish_reason="stop")
    line = result_line(parsed(TEXT), [output], record_id(7, 0xAB), HEADER)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line) == {
        "id": "batch_req_7_00000000000000ab",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": "req_7",
            "body": {
                "id": "cmpl-7",
                "object": "text_completion",
                "created": 1700000000,
                "model": "mine",
                "system_fingerprint": "f" * 16,
                "choices": [
                    {
                        "index": 0,
                        "text": "ab",
                        "finish_reason": "stop",
                        "stop_reason": None,
                        "logprobs": {
                            "tokens": ["token_id:5", "token_id:6"],
                            "token_logprobs": [-0.5, -1.25],
                            "top_logprobs": None,
                            "text_offset": None,
                            "token_ids": [5, 6],
                        },
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }


def test_chat_result() -> None:
    body = body_of(CHAT, finished(logprobs=(-0.5, -1.25), finish_reason="stop"))
    assert (body["id"], body["object"]) == ("chatcmpl-7", "chat.completion")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-0.5, -1.25]


def test_choices_of_several_prompts_are_numbered_through() -> None:
    body = body_of(batch({"prompt": ["a", "b"]}), finished("a"), finished("b"))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}


class Bytes:
    """A tokenizer of single bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def incremental(self, skip_special_tokens: bool = True) -> Any:
        return ByteLevelDetokenizer(TokenBytes(_letter))


def _letter(token_id: int) -> str:
    """How GPT-2's alphabet spells one byte."""
    return next(letter for letter, byte in _BYTE_OF.items() if byte == token_id)


SPELT = replace(HEADER, tokenizer=Bytes())
TOP = (
    {0x61: Logprob(-2.5, 3), 0x62: Logprob(-0.5, 1), 0x63: Logprob(-1.5, 2)},
    {0xC3: Logprob(-0.25, 1), 0xA9: Logprob(-1.75, 2)},
    {0xA9: Logprob(-0.125, 1), 0x61: Logprob(-math.inf, 2)},
)
SPOKEN = {"token_ids": (0x61, 0xC3, 0xA9), "logprobs": (-2.5, -0.25, -0.125), "top_logprobs": TOP}


def test_top_logprobs_of_a_completion() -> None:
    raw = batch({"prompt": "x", "logprobs": 2})
    assert body_of(raw, finished("aé", **SPOKEN), header=SPELT)["choices"][0]["logprobs"] == {
        "tokens": ["a", r"bytes:\xc3", r"bytes:\xa9"],
        "token_logprobs": [-2.5, -0.25, -0.125],
        "top_logprobs": [
            {"b": -0.5, "c": -1.5, "a": -2.5},  # the chosen one beside the two most likely
            {r"bytes:\xc3": -0.25, r"bytes:\xa9": -1.75},
            {r"bytes:\xa9": -0.125},  # the other is impossible
        ],
        "text_offset": [0, 1, 1],
        "token_ids": [0x61, 0xC3, 0xA9],
    }


def test_top_logprobs_of_a_chat() -> None:
    raw = talk(logprobs=True, top_logprobs=2)
    first, second, third = body_of(raw, finished("aé", **SPOKEN), header=SPELT)["choices"][0]["logprobs"][
        "content"
    ]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [0x61], -2.5)
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [("b", -0.5), ("c", -1.5)]
    assert second["bytes"] == [0xC3] and len(second["top_logprobs"]) == 2 and len(third["top_logprobs"]) == 1


def test_prompt_logprobs_and_stop_reason_are_vllms() -> None:
    output = replace(finished(stop_reason="x"), prompt_logprobs=(None, {7: Logprob(-1.5, 2, "g")}))
    choice = body_of(TEXT, output)["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "g"}}]
    assert choice["stop_reason"] == "x"
    # beside the choices of a chat
    assert body_of(CHAT, output)["prompt_logprobs"] == choice["prompt_logprobs"]


@pytest.mark.parametrize("defaults", [{}, {"tool_parser": "hermes", "reasoning_parser": "think"}])
def test_calls_and_reasoning_are_parted_where_their_format_is_known(defaults: dict[str, str]) -> None:
    """Their ids are the same in every run; without a format the text stays as it is."""
    text = '<think>so</think>I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    raw = talk(tools=[{"type": "function", "function": {"name": "add"}}])
    request = parsed(raw, **defaults)
    lines = [result_line(request, [finished(text)], record_id(7, 1), HEADER) for _ in range(2)]
    message = json.loads(lines[0])["response"]["body"]["choices"][0]["message"]
    assert lines[0] == lines[1]
    if not defaults:
        assert message == {"role": "assistant", "content": text, "refusal": None}
        return
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"].startswith("call_")
    assert (message["content"], message["reasoning_content"]) == ("I add.", "so")


def test_n_choices_of_several_prompts() -> None:
    def twice(text: str) -> RequestOutput:
        (choice,) = finished(text).outputs
        return replace(finished(), outputs=(choice, replace(choice, index=1, text=text + "2")))

    body = body_of(batch({"prompt": ["a", "b"], "n": 2}), twice("a"), twice("b"))
    choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert choices == [(0, "a"), (1, "a2"), (2, "b"), (3, "b2")]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}


def test_the_openai_client_reads_our_bodies() -> None:
    types = pytest.importorskip("openai.types", reason="needs the OpenAI client")
    chat = pytest.importorskip("openai.types.chat", reason="needs the OpenAI client")
    top = types.Completion.model_validate(
        body_of(batch({"prompt": "x", "logprobs": 2}), finished("aé", **SPOKEN), header=SPELT), strict=True
    )
    assert top.choices[0].logprobs.top_logprobs[0] == {"b": -0.5, "c": -1.5, "a": -2.5}
    spoken = chat.ChatCompletion.model_validate(
        body_of(talk(logprobs=True, top_logprobs=2), finished("aé", **SPOKEN), header=SPELT), strict=True
    )
    assert spoken.choices[0].logprobs.content[0].top_logprobs[0].token == "b"
    logprobs = {"logprobs": (-0.5, -1.25)}
    completion = types.Completion.model_validate(
        body_of(batch({"prompt": ["a", "b"], "logprobs": 0}), finished(**logprobs), finished(**logprobs)),
        strict=True,
    )
    assert completion.choices[1].logprobs.token_logprobs == [-0.5, -1.25]
    assert (completion.usage.total_tokens, completion.system_fingerprint) == (10, "f" * 16)
    answer = chat.ChatCompletion.model_validate(body_of(CHAT, finished(**logprobs)), strict=True)
    assert answer.choices[0].message.content == "ab" and answer.choices[0].finish_reason == "length"
    assert [token.logprob for token in answer.choices[0].logprobs.content] == [-0.5, -1.25]
    assert types.Completion.model_validate(body_of(TEXT, finished()), strict=True).choices[0].logprobs is None


def test_lines_that_named_no_model_get_the_loaded_one() -> None:
    assert body_of(b'{"prompt": "x"}', finished())["model"] == "theirs"


def test_logprobs_keep_every_bit() -> None:
    values = (-0.10000000149011612, -1e-30)
    block = body_of(TEXT, finished(logprobs=values))["choices"][0]["logprobs"]
    assert tuple(block["token_logprobs"]) == values


def test_output_is_strict_json_even_for_numbers_that_are_not() -> None:
    broken = finished(logprobs=(math.nan, -math.inf))
    assert body_of(TEXT, broken)["choices"][0]["logprobs"]["token_logprobs"] == [None, None]
    content = body_of(CHAT, broken)["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [None, None]


@given(text=st.text(st.characters(codec="utf-8")))
@example(text="a\u2028b\u2029c\x85d\ne")
def test_a_result_is_one_line_for_every_reader(text: str) -> None:
    line = result_line(parsed(TEXT), [finished(text)], record_id(7, 1), HEADER)
    assert line.isascii() and len(line.decode("ascii").splitlines()) == 1
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("stop", None),
        ("length", None),
        ("abort", "aborted"),
        ("error", "engine_error"),
        ("deadline", "deadline"),
        ("queue_timeout", "queue_timeout"),
    ],
)
def test_only_stop_and_length_are_results(reason: str, code: str | None) -> None:
    error = output_error(parsed(b'{"prompt": "x", "custom_id": "a"}'), finished(finish_reason=reason))
    assert (error and error.code) == code
    if error is not None:
        assert (error.line, error.custom_id) == (7, "a")
        detail = json.loads(error_line(error, record_id(7, 1)))["error"]
        assert detail["partial"] == ["ab"]  # what there was is kept


def test_error_line_is_openai_batch_output() -> None:
    line = error_line(line_error(3, "invalid_request", "no", "a"), record_id(3, 2))
    assert json.loads(line) == {
        "id": "batch_req_3_0000000000000002",
        "custom_id": "a",
        "response": None,
        "error": {"code": "invalid_request", "message": "no", "line": 3},
    }


@given(st.integers(1, 10**18 - 1), st.integers(0, 2**64 - 1))
def test_a_record_id_can_be_read_back(line: int, digest: int) -> None:
    assert parse_record_id(record_id(line, digest)) == (line, digest)


@pytest.mark.parametrize("value", [None, 7, "", "batch_req_7", "batch_req_0_" + "0" * 16, "x" * 10**5])
def test_another_id_is_none_of_ours(value: object) -> None:
    assert parse_record_id(value) is None


def test_a_digest_depends_on_bytes_size_and_salt() -> None:
    digests = {
        line_digest(b"a", 1),
        line_digest(b"b", 1),
        line_digest(None, 9),
        line_digest(None, 8),
        line_digest(b"a", 1, b"s"),
    }
    assert len(digests) == 5
