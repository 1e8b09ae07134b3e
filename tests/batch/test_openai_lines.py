"""Lines as users of OpenAI's and vLLM's batch files have them, run by the embedded model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.batch_lines import batch, talk
from xla_engine.batch.lines import read_lines
from xla_engine.batch.results import ResultHeader
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.chat_templates import ChatTemplate

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
)


@pytest.fixture
def engine(embedded: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The session's engine with a chat template."""
    embedded.chat_template = ChatTemplate(sources={"default": TEMPLATE}, special_tokens={})
    yield embedded
    embedded.chat_template = None


def complete(engine: XlaBatchEngine, *lines: bytes) -> list[dict[str, Any]]:
    """The result line of each input line."""
    sink = io.BytesIO()
    header = ResultHeader(created=1, model="m", tokenizer=engine.tokenizer)
    source = read_lines(io.BytesIO(b"\n".join(lines)))
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
