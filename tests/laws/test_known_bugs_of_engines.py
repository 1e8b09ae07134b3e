"""Bugs that engines have shipped and only a model shows, each with a test that would have caught it.

From the same two projects as `test_known_bugs_of_schedulers`. Callers who wait for ever after a crash are in
`test_engine` (`test_a_failed_step_ends_every_request_and_later_submits_fail`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.device import edit_cache
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import TokenLimitError
from xla_engine.llm import LLM
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True, logprobs=20, seed=3)


def complete(engine: XlaBatchEngine, *asked: tuple[list[int], SamplingParams]) -> list[CompletionOutput]:
    """The results of requests that run together, in the order given."""
    engine.reset_prefix_cache()
    names = [engine.submit(prompt, params) for prompt, params in asked]
    outputs = {output.request_id: output.outputs[0] for output in engine.drain()}
    return [outputs[name] for name in names]


def test_a_row_without_top_k_is_not_truncated_by_its_neighbours(tiny: XlaBatchEngine) -> None:
    """The bug: the batch's largest k was applied to all rows, even to rows with 0 (no truncation)."""
    (alone,) = complete(tiny, ([5, 6], DRAWN))
    among, narrow, *_ = complete(
        tiny, ([5, 6], DRAWN), *[([7, seed], replace(DRAWN, top_k=2, seed=seed)) for seed in range(4)]
    )
    assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)
    assert max(_ranks(among)) > 20, "nothing that a small k would have cut off was drawn"
    assert max(_ranks(narrow)) <= 2, "the widest row's k was that of all"


def test_temperature_zero_is_the_most_likely_token_among_rows_that_draw(tiny: XlaBatchEngine) -> None:
    """The bug: temperature 0 caused a division by zero."""
    (alone,) = complete(tiny, ([5, 6], GREEDY))
    _, among = complete(tiny, ([7, 8], DRAWN), ([5, 6], GREEDY))
    assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)
    assert set(_ranks(among)) == {1} and np.isfinite(among.logprobs or ()).all()


def test_what_is_drawn_depends_on_the_request_alone(tiny: XlaBatchEngine) -> None:
    """The bug: all requests shared one unseeded random generator, so each draw depended on the batch's
    members and their order."""
    asked = [([9, seed], replace(DRAWN, seed=seed)) for seed in range(6)]
    forwards, backwards = complete(tiny, *asked), complete(tiny, *asked[::-1])[::-1]
    assert [each.token_ids for each in forwards] == [each.token_ids for each in backwards]
    assert len({each.token_ids for each in forwards}) == len(asked)


def _ranks(output: CompletionOutput) -> list[int]:
    """The rank of each sampled token."""
    assert output.top_logprobs is not None
    return [at[token].rank for token, at in zip(output.token_ids, output.top_logprobs, strict=True)]


def test_nothing_sleeps_between_the_tokens_of_a_lone_request(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: with one live request, each step was followed by a sleep of 5 ms, which limited it to 200
    tokens a second."""
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    complete(tiny, ([1, 2, 3], GREEDY))
    tiny.submit([1, 2, 3], GREEDY)
    while tiny.has_unfinished:
        tiny.step()
    assert not sleeps

    async def read() -> list[Any]:
        loop, timers = asyncio.get_running_loop(), []
        call_at = loop.call_at
        monkeypatch.setattr(loop, "call_at", lambda *args, **kw: timers.append(args) or call_at(*args, **kw))  # type: ignore[func-returns-value]
        llm = AsyncLLM.from_engine(tiny)
        outputs = [output async for output in llm.generate([1, 2, 3], GREEDY)]
        assert outputs[-1].finished
        return timers

    assert asyncio.run(read()) == sleeps == []


def test_characters_of_several_tokens_come_whole(embedded: XlaBatchEngine) -> None:
    """The bug: each token was decoded by itself, so a character that spans several tokens became replacement
    characters."""
    assert embedded.tokenizer is not None
    halves = embedded.tokenizer.encode("é")
    assert len(halves) == 2, "this vocabulary has the character as one token"
    params = SamplingParams(
        max_tokens=32, seed=1, ignore_eos=True, allowed_token_ids=halves, logit_bias={halves[1]: 2.0}
    )
    llm, text = LLM.from_engine(embedded), ""
    for output in llm.stream(["# caf"], params):
        assert output.outputs[0].text.startswith(text), "text was taken back"
        text = output.outputs[0].text
    whole = embedded.tokenizer.decode(output.outputs[0].token_ids)
    assert text == whole and "é" in whole


def test_answers_are_whole_and_say_why_they_ended(embedded: XlaBatchEngine) -> None:
    """The bugs: without streaming the answer was the first token only; it contained the stop token's text;
    every finish reason was "stop"."""
    llm = LLM.from_engine(embedded)
    (long,) = llm.generate(["import os"], replace(GREEDY, max_tokens=20))
    full = long.outputs[0]
    assert (len(full.token_ids), full.finish_reason) == (20, "length")
    stop = full.token_ids[7]
    at = full.token_ids.index(stop)
    (short,) = llm.generate(["import os"], replace(GREEDY, max_tokens=20, stop_token_ids=[stop]))
    assert (short.outputs[0].finish_reason, short.outputs[0].stop_reason) == ("stop", stop)
    assert llm.engine.tokenizer is not None
    assert short.outputs[0].text == llm.engine.tokenizer.decode(full.token_ids[:at])


def test_what_does_not_fit_is_refused_and_neither_cut_nor_written_past_the_end(tiny: XlaBatchEngine) -> None:
    """The bugs: prompts were silently cut at the beginning; prompt plus max_tokens was not checked against
    the cache's length."""
    room = tiny.max_model_len
    for prompt, cap in ((room - 4, 5), (room + 40, 1), (1, room)):
        with pytest.raises(TokenLimitError, match=str(room)):
            tiny.submit([1] * prompt, replace(GREEDY, max_tokens=cap))
    (last,) = complete(tiny, ([1] * (room - 5), replace(GREEDY, max_tokens=5)))
    assert len(last.token_ids) == 5


def test_a_row_attends_to_no_position_that_it_has_not_written(tiny: XlaBatchEngine) -> None:
    """The bug: the mask included one position beyond the last written one."""
    (before,) = complete(tiny, ([4, 5, 6], GREEDY))
    tiny.reset_prefix_cache()
    edit_cache(tiny.runner, lambda _index, _name, array: np.full_like(array, np.nan))
    (after,) = complete(tiny, ([4, 5, 6], GREEDY))
    tiny.runner.blank()
    assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs)
