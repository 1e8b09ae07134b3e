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
        ({"prompt": TEXT, "multi_modal_data": {"image": 1}}, "reads no pictures"),
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


USER = {"role": "user", "content": "write a stack"}


def test_a_data_frame_is_asked_for_its_column_and_its_columns_are_prompts_and_chats(llm: LLM) -> None:
    """Cells read from Parquet are arrays of dicts, and a frame's index need not begin with 0."""
    pandas = pytest.importorskip("pandas", reason="comes with the extra `test`")
    [text], [answer] = _texts(llm, TEXT), llm.chat([USER], GREEDY, use_tqdm=False)
    cells = np.empty(2, object)
    cells[:] = [np.array([USER], object), np.array([{**USER, "tool_calls": None}], object)]
    frame = pandas.DataFrame({"question": [TEXT, TEXT], "messages": cells}, index=[7, 9])
    assert _texts(llm, frame["question"]) == [text, text]
    for chats in (frame["messages"], list(frame["messages"]), [[USER], (USER,)]):
        assert [each.text for each in llm.chat(chats, GREEDY, use_tqdm=False)] == [answer.text] * 2
    parts = [{"role": "user", "content": np.array([{"type": "text", "text": "write a stack"}], object)}]
    assert llm.chat(parts, GREEDY, use_tqdm=False)[0].text == answer.text
    with pytest.raises(InvalidRequestError, match=r"question, messages\), for example table\['messages'\]"):
        llm.generate(frame, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"not a list of conversations; .*table\['question'\]"):
        llm.chat(frame[["question"]], GREEDY, use_tqdm=False)
    outputs = llm.generate([TEXT, TEXT], SamplingParams(seed=1, max_tokens=12, n=2), use_tqdm=False)
    table = outputs.to_pandas()
    assert list(table["generated_text"]) == [each.text for output in outputs for each in output.outputs]
    assert list(table["index"]) == [0, 1, 0, 1]


def test_text_in_place_of_a_chat_is_told_what_to_write(llm: LLM) -> None:
    for text in ("Hello", ["Hello", "you"]):
        with pytest.raises(InvalidRequestError, match=r"write \[\{'role': 'user', 'content': 'Hello'\}\]"):
            llm.chat(text, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_a_dict_is_sampling_parameters(llm: LLM) -> None:
    fields = {"temperature": 0, "max_tokens": 12}
    assert [o.text for o in llm.generate(TEXT, fields, use_tqdm=False)] == _texts(llm, TEXT)
    assert [o.text for o in llm.generate([TEXT] * 2, [fields, GREEDY], use_tqdm=False)] == _texts(
        llm, [TEXT] * 2
    )
    for wrong, message in (
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        (5, "not 5"),
        ([GREEDY, 5], "not 5"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate([TEXT] * 2, wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_a_sampling_field_as_an_option_is_told_where_it_belongs(llm: LLM) -> None:
    calls: list[tuple[Any, Any]] = [(llm.generate, TEXT), (llm.chat, [USER]), (llm.stream, TEXT)]
    for call, prompt in calls:
        with pytest.raises(
            InvalidRequestError, match=r"write \w+\(\.\.\., SamplingParams\(temperature=0\)\)"
        ) as found:
            call(prompt, temperature=0)
        assert len(found.traceback) == 3, "this call, the method and the check"
    with pytest.raises(InvalidRequestError, match="no option 'deadline'; did you mean 'deadline_s'"):
        llm.generate(TEXT, deadline=3)  # type: ignore[call-arg]
    with pytest.raises(
        InvalidRequestError,
        match=r"did you mean 'max_tokens'\? That is a sampling parameter; write generate\(",
    ):
        llm.generate(TEXT, max_token=3)  # type: ignore[call-arg]

    async def ask() -> None:
        async for _ in AsyncLLM.from_engine(llm.engine).generate(TEXT, temperature=0):  # type: ignore[call-arg]
            pass

    with pytest.raises(InvalidRequestError, match="it is a sampling parameter"):
        asyncio.run(ask())


def test_what_a_person_sees_is_short(llm: LLM) -> None:
    assert repr(llm).startswith("LLM(model='embedded', dtype='bfloat16', max_num_seqs=")
    outputs = llm.generate(TEXT, GREEDY, use_tqdm=False)
    [output] = outputs
    completion = output.outputs[0]
    assert repr(output) == (
        f"RequestOutput({output.request_id!r}, prompt={TEXT!r}, outputs=[{completion.text!r} (12 tokens, length)])"
    )
    assert output.text == completion.text and isinstance(outputs, list) and outputs[:1] == [output]
    assert outputs.to_records()[0] | {"request_id": "0"} == {
        "request_id": "0",
        "index": 0,
        "prompt": TEXT,
        "generated_text": completion.text,
        "finish_reason": "length",
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": 12,
        "cumulative_logprob": None,
        "error": None,
        "images_sha256": [],
    }
    several = llm.generate(TEXT, SamplingParams(seed=1, n=2), use_tqdm=False)[0]
    with pytest.raises(InvalidRequestError, match="has 2 answers"):
        _ = several.text
