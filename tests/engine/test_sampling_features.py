"""Sampling fields through the real engine: each does what it says, and law 1 holds with all of them mixed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.models import TINY, TINY_ENGINE
from tests.support.requests import comparable
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError
from xla_engine.text.token_mask import TokenMask

VOCABULARY = TINY.vocab_size


def draw_params(draw: random.Random) -> dict[str, Any]:
    """A random mix of every field that shifts logits or asks for log-probabilities."""
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 14), "ignore_eos": draw.random() < 0.5}
    options: dict[str, Any] = {
        "temperature": draw.choice((0, 0.8, 1.5)),
        "top_p": draw.choice((0.5, 0.95)),
        "top_k": draw.choice((3, 150)),
        "repetition_penalty": draw.choice((0.7, 1.3)),
        "frequency_penalty": draw.choice((-1.0, 1.5)),
        "presence_penalty": draw.choice((-1.5, 2.0)),
        "logit_bias": {draw.randrange(VOCABULARY): draw.choice((-100, 4.5)) for _ in range(3)},
        "allowed_token_ids": draw.sample(range(VOCABULARY), 30),
        "stop_token_ids": draw.sample(range(VOCABULARY), 4),
        "min_tokens": draw.randint(0, fields["max_tokens"]),
        "logprobs": draw.choice((0, 1, 5, 20)),
        "prompt_logprobs": draw.choice((0, 3)),
    }
    fields.update((name, value) for name, value in options.items() if draw.random() < 0.4)
    if fields.get("temperature", 1) > 0:
        fields["n"] = draw.choice((1, 1, 1, 2, 3))
    return fields


def test_every_field_at_once_alone_equals_batched(tiny: XlaBatchEngine) -> None:
    """Law 1: 60 requests of random mixes, random arrivals, lag 0, 1 and 3: no bit differs from the run alone."""
    draw = random.Random(7)
    requests = [
        (
            [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 60))],
            SamplingParams(**draw_params(draw)),
        )
        for _ in range(60)
    ]
    compiled = compiles_of_this_thread()
    alone = {}
    for index, (prompt, params) in enumerate(requests):
        tiny.submit(prompt, params, request_id=f"r{index}")
        (output,) = tiny.drain()
        alone[output.request_id] = comparable(output)
    for lag in (0, 1, 3):
        tiny.lag = lag
        waiting = draw.sample(list(enumerate(requests)), len(requests))
        found = {}
        while waiting or tiny.has_unfinished:
            for index, (prompt, params) in (
                waiting.pop() for _ in range(min(draw.randint(0, 3), len(waiting)))
            ):
                tiny.submit(prompt, params, request_id=f"r{index}")
            found.update({o.request_id: comparable(o) for o in tiny.step() if o.finished})
        assert found.keys() == alone.keys()
        differing = [name for name in alone if found[name] != alone[name]]
        assert not differing, (lag, differing, requests[int(differing[0][1:])])
    assert compiles_of_this_thread() == compiled


def run(engine: XlaBatchEngine, prompt: Any, **fields: Any) -> RequestOutput:
    engine.submit(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields})
    )
    (output,) = engine.drain()
    return output


def test_sequences_of_one_request(tiny: XlaBatchEngine) -> None:
    """They are in order, with different noise, the first as with n = 1; the request is delivered and ends once."""
    fields = {"temperature": 1.5, "seed": 3, "logprobs": 0, "prompt_logprobs": 1}
    many, one = run(tiny, [3, 4], n=5, **fields), run(tiny, [3, 4], **fields)
    assert [choice.index for choice in many.outputs] == list(range(5))
    assert len({choice.token_ids for choice in many.outputs}) == 5
    assert comparable(many)[0] == comparable(one)[0] and many.prompt_logprobs == one.prompt_logprobs
    few = run(tiny, [3, 4], n=2, **fields)
    assert comparable(few)[:2] == comparable(many)[:2]
    params = SamplingParams(n=20, temperature=1.5, max_tokens=9, ignore_eos=True)
    tiny.submit([5], params, request_id="many")
    outputs = list(tiny.stream())
    assert {output.request_id for output in outputs} == {"many"} and [o.finished for o in outputs].count(
        True
    ) == 1
    assert outputs[-1].finished and all(len(choice.token_ids) == 9 for choice in outputs[-1].outputs)
    assert outputs[-1].metrics is not None and len(outputs[-1].metrics.token_times) == 180


def test_a_request_of_many_sequences_is_taken_back_whole(tiny: XlaBatchEngine) -> None:
    params = SamplingParams(n=12, temperature=1, max_tokens=30, ignore_eos=True)
    tiny.submit([5, 6], params, request_id="many")
    for name in ("many", "many[3]"):
        with pytest.raises(InvalidRequestError, match="in use by a live request"):
            tiny.submit([1], SamplingParams(), request_id=name)
    for _ in range(4):
        tiny.step()
    assert tiny.abort("many") and not tiny.abort("many")
    (output,) = tiny.drain()
    assert output.finished and {choice.finish_reason for choice in output.outputs} == {"abort"}
    assert tiny.num_running == tiny.num_waiting == 0
    tiny.submit([5, 6], params, request_id="many")
    assert len(tiny.drain()) == 1


def test_sequences_are_queued_together_or_not_at_all(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine(replace(TINY_ENGINE, max_waiting=4, self_check=False))
    engine.submit([1], SamplingParams(max_tokens=2))
    # the one has a slot to come
    with pytest.raises(QueueFullError, match="12 sequences were not accepted: 0 wait"):
        engine.submit([2], SamplingParams(n=12))
    assert engine.num_waiting == 1
    with pytest.raises(InvalidRequestError, match="never holds more than 12"):
        engine.submit([2], SamplingParams(n=13))
    engine.submit([2], SamplingParams(n=11))
    assert [len(output.outputs) for output in engine.drain()] in ([1, 11], [11, 1])


def test_allowed_tokens_and_bias_decide_what_may_come(tiny: XlaBatchEngine) -> None:
    allowed = run(tiny, [3, 4], allowed_token_ids=[5, 9, 11], temperature=1.5, seed=1, max_tokens=40)
    assert set(allowed.outputs[0].token_ids) == {5, 9, 11}
    assert set(run(tiny, [3, 4], logit_bias={42: 100}).outputs[0].token_ids) == {42}
    free = run(tiny, [3, 4]).outputs[0].token_ids
    assert free[0] not in run(tiny, [3, 4], logit_bias={free[0]: -100}).outputs[0].token_ids


def test_min_tokens_holds_stops_back(tiny: XlaBatchEngine) -> None:
    stop = run(tiny, [3, 4]).outputs[0].token_ids[0]
    assert run(tiny, [3, 4], stop_token_ids=[stop]).outputs[0].token_ids == (stop,)
    later = run(tiny, [3, 4], stop_token_ids=[stop], min_tokens=5).outputs[0]
    assert stop not in later.token_ids[:5] and len(later.token_ids) > 5


def test_penalties_follow_the_history_of_the_slot(tiny: XlaBatchEngine) -> None:
    """Each token counts once; the slot's earlier request does not count; prompt tokens count for repetition only."""
    for _ in range(2 * tiny.max_num_seqs):
        tokens = (
            run(tiny, [3, 4], presence_penalty=2, frequency_penalty=2, max_tokens=30).outputs[0].token_ids
        )
        assert len(set(tokens)) > len(set(run(tiny, [3, 4], max_tokens=30).outputs[0].token_ids))
    assert (
        tokens
        == run(tiny, [3, 4], presence_penalty=2, frequency_penalty=2, max_tokens=30).outputs[0].token_ids
    )
    first = run(tiny, [3, 4]).outputs[0].token_ids[0]
    ending = [5, 6, first, 3, 4]
    free, held = run(tiny, ending, max_tokens=1), run(tiny, ending, max_tokens=1, repetition_penalty=100)
    assert held.outputs[0].token_ids[0] not in ending
    assert (
        run(tiny, ending, max_tokens=1, presence_penalty=2).outputs[0].token_ids == free.outputs[0].token_ids
    )


def test_prompt_logprobs_are_those_of_the_reference(tiny: XlaBatchEngine) -> None:
    """They equal the oracle's log-probabilities of prompt tokens and of the most likely ones, over several chunks."""
    prompt = [random.Random(3).randrange(VOCABULARY) for _ in range(45)]
    output = run(tiny, prompt, prompt_logprobs=4, max_tokens=1)
    logits = ForwardPass(tiny.checkpoint).logits(prompt).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, found in enumerate(output.prompt_logprobs[1:], 1):
        assert found is not None and 4 <= len(found) <= 5
        assert found[prompt[position]].logprob == pytest.approx(
            expected[position - 1, prompt[position]], abs=0.15
        )
        best = sorted((entry.logprob for entry in found.values()), reverse=True)[:4]
        np.testing.assert_allclose(best, np.sort(expected[position - 1])[::-1][:4], atol=0.15)
    assert run(tiny, [7], prompt_logprobs=0).prompt_logprobs == (None,)


def test_top_logprobs_hold_the_token_and_the_most_likely(tiny: XlaBatchEngine) -> None:
    choice = run(tiny, [3, 4], logprobs=5, temperature=1.5, seed=4).outputs[0]
    assert choice.top_logprobs is not None and choice.logprobs is not None
    for token, logprob, entries in zip(choice.token_ids, choice.logprobs, choice.top_logprobs, strict=True):
        assert entries[token].logprob == logprob
        ranks = [entry.rank for entry in entries.values()]
        assert sorted(ranks)[:5] == [1, 2, 3, 4, 5] and len(entries) in (5, 6)
    assert run(tiny, [3, 4], logprobs=0).outputs[0].top_logprobs is None


def test_text_is_left_out_on_request(embedded: XlaBatchEngine) -> None:
    choice = run(embedded, "import os", detokenize=False, logprobs=1).outputs[0]
    assert choice.text == "" and len(choice.token_ids) == 12
    assert (
        choice.top_logprobs is not None and choice.top_logprobs[0][choice.token_ids[0]].decoded_token is None
    )
    shown = run(embedded, "import os", logprobs=1).outputs[0]
    assert shown.top_logprobs is not None
    assert "".join(e[t].decoded_token or "" for t, e in zip(shown.token_ids, shown.top_logprobs, strict=True))


def test_ids_beyond_the_vocabulary_and_empty_masks_are_refused(tiny: XlaBatchEngine) -> None:
    for fields, message in (
        ({"allowed_token_ids": [VOCABULARY]}, f"allowed_token_ids names id {VOCABULARY}"),
        ({"logit_bias": {VOCABULARY: 1}}, f"logit_bias names id {VOCABULARY}"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "leave no token"),
        ({"bad_words": ["x"]}, "no tokenizer.json, so bad_words"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            tiny.submit([1], SamplingParams(**fields))
    assert not tiny.has_unfinished


def test_the_sequences_of_a_request_share_one_mask_at_its_beginning(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each continues by itself: bad words of two tokens forbid the second token only after the first."""
    tokenised = []
    real = type(tiny.validator).token_mask

    def token_mask(self: Any, *rest: Any) -> Any:
        tokenised.append(1)
        return real(self, *rest)

    monkeypatch.setattr(type(tiny.validator), "token_mask", token_mask)
    params = SamplingParams(n=6, seed=3, max_tokens=8, allowed_token_ids=[5, 9, 11], temperature=2.0)
    tiny.submit([3, 4], params)
    (together,) = tiny.drain()
    assert len(tokenised) == 1 and len({output.token_ids for output in together.outputs}) > 1


def test_copies_of_a_mask_go_on_by_themselves() -> None:
    first = TokenMask(16, bad_words=[(1, 2)], stop_ids=[0])
    second = first.copy()
    first.push(1)
    allowed = np.unpackbits(
        np.array([mask.words[0] for mask in (first, second)], "<u4").view(np.uint8), bitorder="little"
    )
    assert allowed[2] == 0 and allowed[32 + 2] == 1
    second.push(1)
    assert (first.words == second.words).all()
    first.reset()
    assert (first.words != second.words).any()
