"""Constraints with a trained model whose calls begin with an added token: Qwen2.5-Coder 0.5B Instruct, Q4_K_M."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trained import qwen25_coder
from tests.trained.runs import opened
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.parsers.chats import Dialect, take_chat

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(qwen25_coder.IS_MISSING, reason=f"needs trained weights: {qwen25_coder.INSTALL}"),
]
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}, "required": ["city"]}},
    {"name": "multiply", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}},
]  # fmt: skip
QUESTIONS = (
    "What is the weather in Paris?",
    "What is 17 times 23?",
    "Weather in São Paulo in F, please",
    "Hello!",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[XlaBatchEngine]:
    file = qwen25_coder.joined(tmp_path_factory.mktemp("qwen"))
    with opened(file, max_num_seqs=4, max_model_len=512) as engine:
        file.unlink()
        yield engine


def answers(engine: XlaBatchEngine, *bodies: dict[str, Any]) -> list[CompletionOutput]:
    for number, fields in enumerate(bodies):
        body = {"temperature": 0, "max_tokens": 64, **fields}
        chat, reading = take_chat(body, Dialect(tools="hermes"), None)
        params = reading.prepared(SamplingParams.from_mapping(body))
        prompt = engine.render_chat(chat.messages, **chat.options)
        engine.submit(prompt, params, request_id=str(number), add_special_tokens=False)
    outputs = {output.request_id: output for output in engine.drain()}
    return [outputs[str(number)].outputs[0] for number in range(len(bodies))]


def chat(question: str, *, strict: bool = False, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {**tool, "strict": strict}} for tool in TOOLS]
    return {"messages": [{"role": "user", "content": question}], "tools": tools, **fields}


@pytest.mark.parametrize("bias", [0, 8])
def test_strict_changes_no_answer_whose_calls_fit(engine: XlaBatchEngine, bias: int) -> None:
    """A model may begin a call with its own token, which this one leaves out unless it has a bias."""
    assert engine.tokenizer is not None
    (token,) = engine.tokenizer.plain_ids("<tool_call>")
    biased: Any = {"logit_bias": {str(token): bias}} if bias else {}
    loose, strict = (
        answers(engine, *(chat(question, strict=each, **biased) for question in QUESTIONS))
        for each in (False, True)
    )
    assert [each.token_ids for each in loose] == [each.token_ids for each in strict]
    many: Any = {"logit_bias": {str(token): 30}, "max_tokens": 1}
    for each in answers(engine, *(chat(QUESTIONS[0], strict=strict, **many) for strict in (False, True))):
        assert list(each.token_ids) == [token]


def test_forced_calls_have_the_arguments_of_the_function(engine: XlaBatchEngine) -> None:
    named = {"type": "function", "function": {"name": "multiply"}}
    found = answers(engine, *(chat("4 times 5?", tool_choice=choice) for choice in ("required", named)))
    whole, arguments = (json.loads(each.text) for each in found)
    assert whole == {"name": "multiply", "arguments": arguments} and arguments == {"a": 4, "b": 5}


def test_keywords_that_are_not_held_leave_the_rest(engine: XlaBatchEngine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "age": {"type": "integer", "not": {"const": 0}},
        },
        "required": ["name", "tags", "age"],
        "if": {"properties": {"age": {"minimum": 18}}},
        "then": {"properties": {"adult": {"const": True}}},
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "Jason is 25 years old, tags a b"}]
    (found,) = answers(engine, {"messages": messages, "response_format": format_})
    value = json.loads(found.text)
    assert (value["name"], value["age"]) == ("Jason", 25) and value.keys() <= {"name", "tags", "age", "adult"}


def test_a_text_with_an_added_token_has_that_token(engine: XlaBatchEngine) -> None:
    assert engine.tokenizer is not None
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "structured_outputs": {"choice": ["a <tool_call> b"]},
    }
    (found,) = answers(engine, body)
    assert found.text == "a <tool_call> b"
    assert list(found.token_ids[:-1]) == engine.tokenizer.plain_ids(found.text)
