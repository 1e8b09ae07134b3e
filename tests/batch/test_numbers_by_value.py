"""Numbers count by value in lines, rows and Python: 2.0 is 2, 2.5 is no integer, and a gap is the field's default."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.batch.datasets.rows import RowColumns, row_lines
from xla_engine.errors import InvalidRequestError
from xla_engine.openai.fields import LINE_FIELDS
from xla_engine.openai.requests import LineError, LineRequest, parse_line
from xla_engine.pooling_outputs import ranked
from xla_engine.pooling_params import PoolingParams
from xla_engine.sampling_params import SamplingParams

INTEGERS = {
    each.name: each.metadata["integers"] for each in fields(SamplingParams) if "integers" in each.metadata
}
# what a field needs beside it
WITH: dict[str, dict[str, Any]] = {
    "logprobs_start": {"prompt_logprobs": 1},
    "min_tokens": {"max_tokens": None},
}


def parsed(**record: Any) -> LineRequest | LineError:
    return parse_line(json.dumps({"prompt": "x =", **record}).encode(), 1)


def integers(name: str) -> st.SearchStrategy[int]:
    low, high = INTEGERS[name]
    found = st.integers(max(low, -(2**53)), min(high, 2**53))  # what a float holds exactly
    return found.filter(bool) if name == "truncate_prompt_tokens" else found  # 0 would leave nothing


@given(data=st.data(), name=st.sampled_from(sorted(INTEGERS)))
def test_a_whole_float_is_its_integer_in_every_field_and_form(data: st.DataObject, name: str) -> None:
    value = data.draw(integers(name))
    given = {name: float(value), **WITH.get(name, {})}
    whole = SamplingParams(**{**given, name: value})
    found = SamplingParams(**given)
    assert found == whole and type(getattr(found, name)) is int
    if None in given.values():
        return  # in lines, null is the default
    line = parsed(**given)
    assert isinstance(line, LineRequest) and line.params == whole
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x =", **given}}
    line = parse_line(json.dumps(body).encode(), 1)
    assert isinstance(line, LineRequest) and line.params == whole
    (row,) = row_lines([{"prompt": "x =", **given}], RowColumns(prompt="prompt", sampling=tuple(given)))
    assert row.raw is not None
    line = parse_line(row.raw, 1)
    assert isinstance(line, LineRequest) and line.params == whole


@pytest.mark.parametrize("name", sorted(INTEGERS))
@pytest.mark.parametrize("value", [2.5, 1e300, "2", True])
def test_what_is_no_integer_is_refused_by_name(name: str, value: Any) -> None:
    line = parsed(**{name: value, **({"prompt_logprobs": 1} if name == "logprobs_start" else {})})
    assert isinstance(line, LineError) and line.message.startswith(f"{name} must be ")


def test_integers_inside_fields_and_beside_them_count_by_value() -> None:
    params = SamplingParams(stop_token_ids=[3.0], allowed_token_ids=[3, 4.0], logit_bias={5.0: 1})  # type: ignore[list-item, dict-item]
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3,), (3, 4)) and params.logit_bias == {
        5: 1.0
    }
    assert PoolingParams(dimensions=8.0).dimensions == 8  # type: ignore[arg-type]
    assert len(ranked(["a", "b"], [1.0, 2.0], 1.0)) == 1  # type: ignore[arg-type]
    line = parse_line(b'{"prompt": [1.0, 2, 3.0], "priority": 2.0}', 1)
    assert isinstance(line, LineRequest) and line.prompts == ((1, 2, 3),)
    assert [type(each) for each in line.prompts[0]] == [int, int, int]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2.0}
    line = parse_line(json.dumps({"url": "/v1/chat/completions", "body": chat}).encode(), 1)
    assert isinstance(line, LineRequest) and line.params.logprobs == 2
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids entry must be an integer, not 2\.5"):
        SamplingParams(stop_token_ids=[2.5])  # type: ignore[list-item]


KNOWN = sorted(
    {each.name for each in fields(SamplingParams)} | (LINE_FIELDS - {"prompt", "url", "method", "body"})
)


@given(names=st.lists(st.sampled_from(KNOWN), unique=True), gap=st.sampled_from([None, math.nan]))
def test_a_gap_is_the_default_of_its_field_in_a_plain_line(names: list[str], gap: float | None) -> None:
    """As in an OpenAI body. Python's json writes NaN for the gaps of a DataFrame, pandas' own writer null."""
    line = parsed(**dict.fromkeys(names, gap))
    assert line == parsed()


def test_columns_of_chats_and_prompts_may_be_mixed() -> None:
    chat = parsed(prompt=None, messages=[{"role": "user", "content": "Hello"}])
    assert isinstance(chat, LineRequest) and chat.is_chat
    text = parsed(messages=None, url=None, body=None, method=None)
    assert isinstance(text, LineRequest) and not text.is_chat
    line = parsed(prompt=None)
    assert isinstance(line, LineError) and 'no "prompt"' in line.message
    line = parsed(promt=None)
    assert isinstance(line, LineError) and "unknown field" in line.message
    line = parse_line(b'{"prompt": "x", "max_tokens": Infinity}', 1)
    assert isinstance(line, LineError) and "Infinity is not JSON" in line.message


def test_gaps_in_columns_are_missing() -> None:
    columns = RowColumns(prompt="prompt", id="n", sampling=("max_tokens", "seed"))
    rows = [
        {"prompt": "x", "n": 1.0, "max_tokens": 2.0, "seed": math.nan},
        {"prompt": "x", "n": math.nan, "max_tokens": 2, "seed": 1},
        {"prompt": math.nan, "n": 3, "max_tokens": 2, "seed": 1},
    ]
    first, second, third = row_lines(rows, columns)
    assert json.loads(first.raw or b"") == {"prompt": "x", "custom_id": "1", "max_tokens": 2.0}
    assert second.problem is not None and "has no id" in second.problem
    assert third.problem is not None and "'prompt' is empty" in third.problem


def test_a_misspelt_field_is_suggested() -> None:
    for record, wrong, right in (
        (SamplingParams, "temprature", "temperature"),
        (PoolingParams, "dimension", "dimensions"),
    ):
        with pytest.raises(
            TypeError, match=f"{record.__name__} has no field '{wrong}'; did you mean '{right}'"
        ):
            record(**{wrong: 1})
    assert all(each.default is not MISSING for each in fields(SamplingParams))
