"""What a user of vLLM, numpy, torch, pandas or datasets passes as prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from xla_engine import LLM, AsyncLLM, SamplingParams, TextPrompt, TokensPrompt
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXT = "def fibonacci(n):"


@pytest.fixture
def llm(embedded: XlaBatchEngine) -> LLM:
    """An LLM around the session's engine."""
    return LLM.from_engine(embedded)


def _texts(llm: LLM, prompts: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_dicts_of_vllm_are_the_prompt_they_hold(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    [expected] = _texts(llm, TEXT)
    assert _texts(llm, {"prompt": TEXT}) == [expected]
    assert _texts(llm, {"prompt_token_ids": ids}) == [expected]
    assert _texts(llm, [TextPrompt(prompt=TEXT), TokensPrompt(prompt_token_ids=ids), TEXT]) == [expected] * 3
    assert _texts(llm, {"prompt": TEXT, "cache_salt": "a", "multi_modal_data": None}) == [expected]
    [output] = llm.generate({"prompt_token_ids": ids, "prompt": "shown"}, GREEDY, use_tqdm=False)
    assert output.prompt == "shown" and output.prompt_token_ids == tuple(ids)


def test_submit_and_async_take_the_same_dicts(llm: LLM) -> None:
    [expected] = _texts(llm, TEXT)
    llm.engine.submit({"prompt": TEXT}, GREEDY)
    assert [output.outputs[0].text for output in llm.engine.drain()] == [expected]

    async def last() -> str:
        return [
            o.outputs[0].text
            async for o in AsyncLLM.from_engine(llm.engine).generate({"prompt": TEXT}, GREEDY)
        ][-1]

    assert asyncio.run(last()) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": TEXT}, "remove 'text'"),
        ({"prompt": TEXT, "multi_modal_data": {"image": 1}}, "remove 'multi_modal_data'"),
        ({}, "needs 'prompt'"),
        ({"prompt": [1, 2]}, "must be text"),
        ({"prompt_token_ids": "ab"}, "token ids"),
        ({"prompt": TEXT, "cache_salt": 3}, "cache_salt"),
        (7, "prompts must be"),
        ([[1], 2.5], "text or token ids"),
    ],
)
def test_other_things_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert not llm.engine.has_work


class Column:
    """A column of `datasets`: a sequence that is no list."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __iter__(self) -> Any:
        return iter(self._items)


class Tensor:
    """The least that an array of another library offers."""

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __array__(self) -> np.ndarray[Any, Any]:
        return np.array(self._items)


def test_arrays_and_columns_are_taken_as_what_they_are(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    [expected] = _texts(llm, TEXT)
    for prompts in (np.array(ids), np.array([ids]), Tensor(ids), [np.array(ids)], [np.int64(i) for i in ids]):
        assert _texts(llm, prompts) == [expected]
    assert _texts(llm, {"prompt_token_ids": np.array(ids, np.int32)}) == [expected]
    assert _texts(llm, Column([TEXT, TEXT])) == [expected] * 2
    assert _texts(llm, np.array([TEXT, TEXT])) == [expected] * 2
    with pytest.raises(InvalidRequestError, match="not an integer"):
        llm.generate(np.array([0.5, 1.0]).reshape(1, 2), GREEDY, use_tqdm=False)
