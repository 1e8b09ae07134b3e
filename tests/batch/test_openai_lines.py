"""Lines as users of OpenAI's and vLLM's batch files have them, run by the embedded model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.batch_lines import batch, talk
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.openai.results import ResultHeader

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
)


@pytest.fixture
def engine(embedded: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The session's engine with another chat template."""
    own = embedded.chat_template
    embedded.chat_template = ChatTemplate(sources={"default": TEMPLATE}, special_tokens={})
    yield embedded
    embedded.chat_template = own


def complete(engine: XlaBatchEngine, *lines: bytes) -> list[dict[str, Any]]:
    """The result line of each input line."""
    sink = io.BytesIO()
    header = ResultHeader(created=1, model="m", tokenizer=engine.tokenizer)
    data = b"\n".join(lines).replace(b'"custom_id": "c", ', b"")
    source = read_lines(io.BytesIO(data))
    BatchRun(engine, source, sink, header=header, ordered=True).run()
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def bodies(engine: XlaBatchEngine, *lines: bytes) -> list[dict[str, Any]]:
    records = complete(engine, *lines)
    assert all(record["error"] is None for record in records), records
    return [record["response"]["body"] for record in records]


def test_a_chat_without_max_tokens_runs_to_its_end(engine: XlaBatchEngine) -> None:
    chat, plain = bodies(
        engine,
        talk(temperature=0, ignore_eos=True),
        json.dumps({"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}).encode(),
    )
    for body in (chat, plain):
        assert body["usage"]["total_tokens"] == engine.max_model_len
        assert body["choices"][0]["finish_reason"] == "length"
    [prompt] = bodies(engine, batch({"prompt": "import", "ignore_eos": True}))
    assert prompt["usage"]["completion_tokens"] == 16


def test_fields_of_openai_that_change_no_token_are_accepted(engine: XlaBatchEngine) -> None:
    labels = {
        "store": True,
        "metadata": {"run": "7"},
        "service_tier": "flex",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "stream_options": None,
        "parallel_tool_calls": True,
    }
    sampling = {"temperature": 0, "max_completion_tokens": 4}
    lines = [
        batch({"prompt": "import", **sampling, **labels}),
        json.dumps({"prompt": "import", **sampling, **labels}).encode(),
        batch({"prompt": "import", "temperature": 0, "max_tokens": 4}),
    ]
    texts = [body["choices"][0]["text"] for body in bodies(engine, *lines)]
    assert len(set(texts)) == 1
    [chat] = bodies(engine, talk(**sampling, **labels))
    assert chat["usage"]["completion_tokens"] == 4


def test_tools_are_shown_to_the_chat_template(engine: XlaBatchEngine) -> None:
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    cap = {"max_tokens": 1, "temperature": 0}
    with_tools, auto, without, empty = bodies(
        engine,
        talk(tools=tools, **cap),
        talk(tools=tools, tool_choice="auto", **cap),
        talk(**cap),
        talk(tools=[], **cap),
    )
    assert engine.tokenizer is not None
    assert with_tools["usage"]["prompt_tokens"] == len(engine.tokenizer.encode("# search\n# Hello\n"))
    assert with_tools["usage"] == auto["usage"] != without["usage"] == empty["usage"]


def test_echo_scores_a_prompt_without_going_on(engine: XlaBatchEngine) -> None:
    """Like the requests of evaluation harnesses to OpenAI's completions: `max_tokens` 0, `echo`, `logprobs`."""
    assert engine.tokenizer is not None
    text = "def size(self):"
    ids = engine.tokenizer.encode(text)
    scored, from_ids, silent = bodies(
        engine,
        batch({"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 2}),
        batch({"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}),
        batch({"prompt": text, "max_tokens": 0, "echo": True}),
    )
    choice = scored["choices"][0]
    assert choice["text"] == text and choice["finish_reason"] == "length"
    assert scored["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    block = choice["logprobs"]
    assert block["token_ids"] == ids and "".join(block["tokens"]) == text
    assert block["token_logprobs"][0] is None and block["top_logprobs"][0] is None
    assert all(value < 0 for value in block["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in block["top_logprobs"][1:])
    for start, token in zip(block["text_offset"], block["tokens"], strict=True):
        assert text.startswith(token, start)
    same = from_ids["choices"][0]
    assert same["text"] == text and same["logprobs"]["top_logprobs"] is None
    assert same["logprobs"]["token_logprobs"] == block["token_logprobs"]
    assert silent["choices"][0]["text"] == text and silent["choices"][0]["logprobs"] is None


def test_echo_stands_before_what_is_generated(engine: XlaBatchEngine) -> None:
    common = {"prompt": "def size(self):", "temperature": 0, "max_tokens": 6, "logprobs": 1}
    echoed, plain = bodies(engine, batch({**common, "echo": True}), batch(common))
    long, short = echoed["choices"][0], plain["choices"][0]
    assert long["text"] == common["prompt"] + short["text"] and echoed["usage"] == plain["usage"]
    assert "prompt_logprobs" not in long
    for name in ("tokens", "token_logprobs", "top_logprobs", "token_ids"):
        assert long["logprobs"][name][-6:] == short["logprobs"][name]
    start = len(str(common["prompt"]))
    assert long["logprobs"]["text_offset"][-6:] == [start + each for each in short["logprobs"]["text_offset"]]


def test_a_misspelt_field_is_answered_with_the_right_one(engine: XlaBatchEngine) -> None:
    records = complete(engine, b'{"prompt": "x", "temprature": 0}', b'{"promt": "x"}', talk(max_token=3))
    messages = [record["error"]["message"] for record in records]
    for message, name in zip(messages, ("temperature", "prompt", "max_tokens"), strict=True):
        assert f"did you mean '{name}'?" in message
