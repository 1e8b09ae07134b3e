"""A few of the hostile batch lines and model files of the long runs, and a proof that their checks can fail."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import fuzz_checkpoints
from tests.support.fuzz_lines import cases, fuzz
from tests.support.tiers import default
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.openai.fields import CHAT_URL, COMPLETIONS_URL
from xla_engine.openai.results import ResultHeader


@pytest.fixture
def chatty(embedded: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The embedded model, which has another chat template for the time of a test."""
    own = embedded.chat_template
    yield embedded
    embedded.chat_template = own


@pytest.mark.parametrize("seed", default([1, 2]))
def test_hostile_lines_crash_hang_and_lose_nothing(chatty: XlaBatchEngine, seed: int) -> None:
    compiled = chatty.stats().compiles_after_warmup  # of this process: other engines count
    report = fuzz(chatty, 700, seed=seed)
    assert not report.problems
    assert report.sentinels == 2 and report.results > 50 and len(report.codes) >= 3
    assert chatty.stats().compiles_after_warmup == compiled and not chatty.has_unfinished


def test_the_fuzz_run_can_fail(chatty: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seen = chatty.submit, []

    def faulty(prompt: Any, params: Any = None, **options: Any) -> str:
        seen.append(prompt)
        if len(seen) == 5:
            raise ZeroDivisionError("planted")
        return submit(prompt, params, **options)

    monkeypatch.setattr(chatty, "submit", faulty)
    assert any("planted" in problem for problem in fuzz(chatty, 100).problems)


def test_the_openai_client_reads_every_result_of_the_real_engine(chatty: XlaBatchEngine) -> None:
    """Chat and completions, n, several prompts, top logprobs, a schema: strictly, by OpenAI's own types."""
    types = pytest.importorskip("openai.types", reason="needs the OpenAI client")
    chat = pytest.importorskip("openai.types.chat", reason="needs the OpenAI client")
    messages = [{"role": "user", "content": "Hello é"}]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    bodies = [
        {
            "messages": messages,
            "max_completion_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "seed": 1,
        },
        {"messages": messages, "max_tokens": 20, "response_format": form},
        {"prompt": ["x = ", "import "], "max_tokens": 4, "logprobs": 2, "n": 2, "stop": ["\n"]},
    ]
    lines = b"".join(
        json.dumps({"url": CHAT_URL if "messages" in body else COMPLETIONS_URL, "body": body}).encode()
        + b"\n"
        for body in bodies
    )
    chatty.chat_template = ChatTemplate(sources={"default": "{{ messages[0].content }}"}, special_tokens={})
    sink, header = io.BytesIO(), ResultHeader(created=1, model="m", tokenizer=chatty.tokenizer)
    totals = BatchRun(chatty, read_lines(io.BytesIO(lines)), sink, header=header, ordered=True).run()
    assert totals.ok == 3, sink.getvalue()
    talk, formed, several = (json.loads(line)["response"]["body"] for line in sink.getvalue().splitlines())
    talk = chat.ChatCompletion.model_validate(talk, strict=True)
    assert len(talk.choices) == 2 and len(talk.choices[1].logprobs.content[0].top_logprobs) == 2
    formed = chat.ChatCompletion.model_validate(formed, strict=True)
    assert json.loads(formed.choices[0].message.content).keys() == {"a"}
    several = types.Completion.model_validate(several, strict=True)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    for choice in several.choices:
        assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.tokens) == len(
            choice.logprobs.top_logprobs
        )


def test_the_cases_repeat_and_are_lines() -> None:
    first, again = ([next(stream) for _ in range(200)] for stream in (cases(3), cases(3)))
    assert first == again and not any(b"\n" in raw for raw in first)
    kinds = {type(_load(raw)) for raw in first}
    assert dict in kinds and type(None) in kinds


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


@pytest.mark.full
@pytest.mark.parametrize("count", [80, pytest.param(250, marks=pytest.mark.full)])
def test_hostile_model_files_are_loaded_or_refused(count: int) -> None:
    report = fuzz_checkpoints.fuzz(count, seed=1)
    assert not report.problems
    outcomes = Counter(outcome for _, outcome in report.outcomes.elements())
    assert outcomes.keys() == {"loaded", "refused"} and min(outcomes.values()) > count // 8


def test_the_fuzz_of_model_files_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(path: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(fuzz_checkpoints, "sampling_defaults", faulty)
    problems = fuzz_checkpoints.fuzz(20).problems
    assert problems and all("planted" in problem for problem in problems)
