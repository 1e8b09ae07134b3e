"""Rows to requests and outputs to columns, without Ray."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_lines import HEADER, finished, parsed, talk
from tests.support.receipts import Job, audited
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError, ReceiptError
from xla_engine.openai.requests import LineError, LineRequest
from xla_engine.openai.results import result_line
from xla_engine.ray.receipts import numbered, write_receipts
from xla_engine.ray.results import ERROR
from xla_engine.ray.stage import EngineActor, ModelStage, _added, _answered, record_of, request_of

pa = pytest.importorskip("pyarrow")

ROWS: list[dict[str, Any]] = [
    {
        "key": 1,
        "prompt": "def f(x):",
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "logprobs": 2},
    },
    {"key": 2, "prompt": "", "sampling_params": None},
    {
        "key": 3,
        "prompt": "import os",
        "sampling_params": {"max_tokens": 4, "temperature": 0.9, "logprobs": 0},
    },
    {"key": 4, "prompt": "x", "sampling_params": {"max_tokens": 100_000}},
    {"key": 5, "prompt": "import os", "sampling_params": {"max_tokens": 4, "temperature": 0.9}},
]


def requested(row: dict[str, Any], defaults: dict[str, Any], *named: Any) -> LineRequest | LineError:
    return request_of(record_of(row, defaults, *named), defaults)


def test_a_row_is_a_request_of_its_columns() -> None:
    chat = {"messages": [{"role": "user", "content": "hi", "tool_calls": None}], "prompt": None}
    request = requested(chat, {"max_tokens": 3}, None, len)
    assert isinstance(request, LineRequest) and request.is_chat and request.params.max_tokens == 3
    request = requested({"tokenized_prompt": [1, 2], "key": 7}, {}, "key", int)
    assert isinstance(request, LineRequest) and request.prompts == ((1, 2),) and request.params.seed == 7
    names: list[str] = []

    def seed_of(name: str) -> int:
        names.append(name)
        return 1

    for other in ({"prompt": "a", "other": 1}, {"prompt": "a", "other": 2}, {"prompt": "b"}):
        record_of(other, {}, None, seed_of)
    assert names[0] == names[1] != names[2]
    for given, default in ((5, 6), (None, 5)):
        seeded = {"prompt": "a", "sampling_params": {"seed": given}}
        request = requested(seeded, {"seed": default}, None, len)
        assert isinstance(request, LineRequest) and request.params.seed == 5
    bad: list[dict[str, Any]] = [{}, {"prompt": 5}, {"prompt": "x", "sampling_params": {"n": 2}}]
    for row in (*bad, {"prompt": "x", "sampling_params": {"top": 1}}):
        assert isinstance(requested(row, {}, None, len), LineError)


def test_functions_before_and_after_see_all_columns_and_errors_widen_no_table() -> None:
    assert _added(lambda row: {"prompt": row["a"]})({"a": 1, "b": 2}) == {"a": 1, "b": 2, "prompt": 1}
    after = _answered(lambda row: {"answer": row["generated_text"]})
    assert after({"generated_text": "x", ERROR: ""}) == {"answer": "x", ERROR: ""}
    assert after({"generated_text": "", ERROR: "why", "a": 1}) == {"answer": "", ERROR: "why"}
    fails = _answered(lambda row: {"first": row["generated_text"][0]}, ("key",))
    assert fails({"generated_text": "", ERROR: "why", "key": 1, "a": 1}) == {"key": 1, ERROR: "why"}


@pytest.fixture
def actor(embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EngineActor]]:
    monkeypatch.setattr(XlaBatchEngine, "from_pretrained", lambda *arguments, **options: embedded)
    yield EngineActor


def batch_of(actor: EngineActor, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def read() -> Any:
        return [table async for table in actor(pa.Table.from_pylist(rows))]

    (table,) = asyncio.run(read())
    return table.to_pylist()


def test_an_actor_gives_each_row_its_columns(actor: type[EngineActor], embedded: XlaBatchEngine) -> None:
    rows = batch_of(actor(ModelStage(id_column="key")), ROWS)
    assert [row["key"] for row in rows] == [1, 2, 3, 4, 5]
    assert [bool(row[ERROR]) for row in rows] == [False, True, False, True, False]
    assert (
        rows[0]["num_generated_tokens"] == len(rows[0]["generated_tokens"]) == len(rows[0]["logprobs"]) == 6
    )
    assert len(rows[0]["logprobs"][0]) >= 2 and rows[0]["logprobs"][0][0]["rank"] >= 1
    assert len(rows[2]["logprobs"]) == 4 and rows[2]["logprobs"][0][0]["rank"] is None
    assert rows[1]["generated_text"] == "" and "prompt is empty" in rows[1][ERROR]
    assert "max_model_len" in rows[3][ERROR]
    assert rows[2]["generated_tokens"] != rows[4]["generated_tokens"]  # of one prompt, but not one row
    again = batch_of(actor(ModelStage(id_column="key")), list(reversed(ROWS)))
    assert again == list(reversed(rows))
    same = batch_of(actor(ModelStage()), [ROWS[4], ROWS[4] | {"key": 9}])
    assert same[0]["generated_tokens"] == same[1]["generated_tokens"]


def test_an_actor_takes_options_by_vllms_names(actor: type[EngineActor]) -> None:
    assert batch_of(actor(ModelStage(engine={"enable_chunked_prefill": True})), ROWS[:1])[0][ERROR] == ""


def test_rows_have_receipts_that_are_written_to_one_file(
    actor: type[EngineActor], embedded: XlaBatchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two actors, with a row that ran twice in another place; errors too; and an auditor accepts them."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)  # actors say when they began
    stage = ModelStage(id_column="key", receipts=True, sampling={"top_p": 0.9})
    one, two = (batch_of(actor(stage), ROWS[part]) for part in (slice(3), slice(3, None)))
    again = batch_of(actor(stage), list(reversed(ROWS)))
    assert [row["receipt"] for row in one + two] == [row["receipt"] for row in reversed(again)]
    job = Job(tmp_path / "out.jsonl", tmp_path / "out.receipts.jsonl")
    assert write_receipts(one + two, job.results, job.receipts) == 5
    report = audited(embedded, job)
    assert report.ok and (report.checked, report.errors) == (5, 2), report.lines()
    answers, _ = job.read()
    assert [each["custom_id"] for each in answers] == ["1", "2", "3", "4", "5"]
    assert answers[2]["response"]["body"]["id"] == "cmpl-3"
    texts = [each["response"]["body"]["choices"][0]["text"] for each in answers if each["response"]]
    assert texts == [row["generated_text"] for row in one + two if not row[ERROR]]
    assert all(
        each["error"]["message"] in row[ERROR]
        for each, row in zip(answers, one + two, strict=True)
        if row[ERROR]
    )
    for wrong, why in (
        (one + one, "two rows have the id '1'"),
        ([{"key": 1}], "receipts=True"),
        ([], "no rows"),
    ):
        with pytest.raises(ReceiptError, match=why):
            write_receipts(wrong, tmp_path / f"{why[:3]}.jsonl", tmp_path / f"{why[:3]}.receipts.jsonl")
    after = _answered(lambda row: {"answer": row["generated_text"]})
    assert after({"generated_text": "x", ERROR: "", "receipt": "r"}) == {
        "answer": "x",
        ERROR: "",
        "receipt": "r",
    }


def test_an_answer_gets_the_ids_of_its_line() -> None:
    """With tool calls, whose ids depend on the line too."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    forced = {"type": "function", "function": {"name": "f"}}
    raw = talk(tools=[{"type": "function", "function": function}], tool_choice=forced)
    one, seven = (
        json.loads(result_line(parsed(raw, line), [finished("{}")], f"name-{line}", HEADER))
        for line in (1, 7)
    )
    assert one["response"]["body"]["choices"][0]["message"]["tool_calls"][0]["id"].startswith("call_")
    assert numbered(one, 7, "name-7", "c") == seven != one


def test_a_bad_row_ends_the_job_only_where_asked_for(actor: type[EngineActor]) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        batch_of(actor(ModelStage(id_column="key", should_continue_on_error=False)), ROWS[:2])


@pytest.mark.parametrize("fields", [{"batch_size": 0}, {"concurrency": (2, 1)}, {"concurrency": 0}])
def test_what_is_no_stage_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelStage(**fields)
    with pytest.raises(ConfigError, match="enable_chunked_prefill=False is not possible here"):
        ModelStage(engine={"enable_chunked_prefill": False})
    ModelStage(engine={"enable_chunked_prefill": True, "gpu_memory_utilization": 0.5})
    with pytest.raises(InvalidRequestError):
        ModelStage(sampling={"temprature": 1})
