"""The engine's loop: every request ends exactly once, bad input harms no other request, and failures are reported."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_request_ends_exactly_once(tiny: XlaBatchEngine, lag: int) -> None:
    """Requests arrive at random and are aborted in every state; the counts of tokens and reasons agree."""
    draw = random.Random(lag)
    tiny.lag = lag
    ends: Counter[str] = Counter()
    live: set[str] = set()
    submitted = aborted = 0
    for case in draw_cases(tiny, 80, seed=20 + lag):
        live.add(tiny.submit(case.prompt_token_ids, case.params, request_id=f"{lag}-{submitted}"))
        submitted += 1
        for _ in range(draw.choice((0, 0, 1, 3))):
            for output in tiny.step():
                if output.finished:
                    ends[output.request_id] += 1
                    live.discard(output.request_id)
        if live and draw.random() < 0.3:
            aborted += tiny.abort(draw.choice(sorted(live)))
        tiny.scheduler.check()
    ends.update(output.request_id for output in tiny.drain())
    assert len(ends) == submitted and set(ends.values()) == {1}
    assert aborted > 5
    assert not tiny.has_unfinished


def test_outputs_are_cumulative_and_finish_once(tiny: XlaBatchEngine) -> None:
    tiny.submit([1, 2, 3], GREEDY, request_id="a")
    seen: list[tuple[int, ...]] = []
    flags = []
    for output in tiny.stream():
        seen.append(output.outputs[0].token_ids)
        flags.append(output.finished)
    assert flags == [False] * (len(flags) - 1) + [True]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))
    assert len(seen[-1]) == GREEDY.max_tokens


def test_stop_beats_length_and_shows_its_id(tiny: XlaBatchEngine) -> None:
    tiny.submit([1, 2, 3], GREEDY)
    (free,) = tiny.drain()
    tokens = free.outputs[0].token_ids
    for cap in (1, 3, 8):
        stop = tokens[cap - 1]
        first = tokens.index(stop)
        tiny.submit([1, 2, 3], replace(GREEDY, max_tokens=cap, stop_token_ids=[stop]))
        (output,) = tiny.drain()
        assert output.outputs[0].token_ids == tokens[: first + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason == stop


def test_eos_of_the_checkpoint_ends_unless_ignored(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine()
    engine.submit([1, 2, 3], GREEDY)
    eos = engine.drain()[0].outputs[0].token_ids[2]
    with XlaBatchEngine(tiny_checkpoint(eos=(eos,)), None, TINY_ENGINE) as engine:
        engine.submit([1, 2, 3], replace(GREEDY, ignore_eos=False))
        (output,) = engine.drain()
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].token_ids[-1] == eos
    assert output.outputs[0].stop_reason is None  # an eos id needs no naming


def test_abort_frees_the_slot_for_the_next_plan(tiny: XlaBatchEngine) -> None:
    for index in range(TINY_ENGINE.max_num_seqs + 1):
        tiny.submit([index + 1] * 3, replace(GREEDY, max_tokens=60), request_id=f"r{index}")
    tiny.step()
    assert tiny.num_waiting == 1
    assert tiny.abort("r3") and not tiny.abort("r3") and not tiny.abort("unknown")
    outputs = tiny.step()
    assert [o.request_id for o in outputs if o.finished] == ["r3"]
    assert tiny.num_waiting == 0
    assert outputs and all(o.outputs[0].finish_reason in (None, "abort") for o in outputs)


def test_exact_fit_completes_and_one_more_is_refused_with_all_three_numbers(tiny: XlaBatchEngine) -> None:
    limit = tiny.max_model_len
    tiny.submit([4] * (limit - 8), GREEDY)
    (output,) = tiny.drain()
    assert len(output.outputs[0].token_ids) == 8
    with pytest.raises(TokenLimitError, match=rf"\({limit - 7} tokens\).*\(8\) is {limit + 1}.* {limit};"):
        tiny.submit([4] * (limit - 7), GREEDY)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([TINY.vocab_size], f"{TINY.vocab_size} is not an integer in 0..{TINY.vocab_size - 1}"),
        ([-1], "-1 is not an integer"),
        ([1.5], "1.5 is not an integer"),
        ([True], "True is not an integer"),
        ("text", "no tokenizer.json"),
    ],
)
def test_bad_prompts_are_refused_and_change_nothing(tiny: XlaBatchEngine, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tiny.submit(prompt, GREEDY)
    assert not tiny.has_unfinished


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": 0.001}, "use 0 for greedy"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -2}, "top_k must be between -1"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"seed": 2**64}, "seed must be between"),
        ({"n": 0}, "n must be between 1 and 128"),
        ({"n": 129}, "n must be between 1 and 128"),
        ({"n": 2, "temperature": 0}, "greedy sequences are all the same"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
        ({"logprobs": -1}, "logprobs must be between 0 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be between"),
        ({"min_tokens": 17}, "more than max_tokens"),
        ({"min_tokens": -1}, "min_tokens must be between"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in"),
        ({"logit_bias": [1]}, "must map token ids to numbers"),
        ({"logit_bias": {"x": 1}}, "logit_bias id must be an integer"),
        ({"logit_bias": {"-1": 1}}, "logit_bias id must be an integer"),
        ({"logit_bias": {5: 101}}, r"logit_bias of 5 must be in \[-100, 100\]"),
        ({"logit_bias": {5: 1, "5": 2}}, "twice"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "301 ids; at most 300"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": "5"}, "list of token ids"),
        ({"bad_words": "x"}, "bad_words must be a list of strings"),
        ({"bad_words": [" "]}, "not blank"),
        ({"bad_words": ["x"] * 129}, "129 bad_words given; at most 128"),
        ({"detokenize": 0}, "detokenize must be true or false"),
        ({"detokenize": False, "stop": "x"}, "leave detokenize true"),
        ({"stop_token_ids": "5"}, "list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"stop": 5}, "stop must be text or a list of texts, not int"),
        ({"stop": ["x", 5]}, "stop must be text or a list of texts, not list"),
        ({"stop": b"x"}, "not bytes"),
        ({"stop": ["x", ""]}, "a stop string is empty"),
        ({"stop": ["x"] * 10**6}, "1000000 stop strings given; at most 256"),
        ({"stop": ["x" * 10**5, "y"]}, "100001 characters together; at most 16384"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false"),
        ({"best_of": 2}, "'best_of' is not supported"),
        ({"temprature": 1}, "unknown field 'temprature'"),
    ],
)
def test_bad_sampling_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams.from_mapping(fields)


def test_stop_ids_beyond_the_vocabulary_or_the_table_are_refused(tiny: XlaBatchEngine) -> None:
    with pytest.raises(InvalidRequestError, match=f"stop token id {TINY.vocab_size}"):
        tiny.submit([1], SamplingParams(stop_token_ids=[TINY.vocab_size]))
    with pytest.raises(InvalidRequestError, match="eos ids; with min_tokens at most 8"):
        tiny.submit([1], SamplingParams(stop_token_ids=list(range(1, 9)), min_tokens=1))


def test_a_live_id_is_refused_and_a_finished_one_is_free(tiny: XlaBatchEngine) -> None:
    tiny.submit([1], GREEDY, request_id="x")
    with pytest.raises(InvalidRequestError, match="'x' is in use"):
        tiny.submit([1], GREEDY, request_id="x")
    tiny.drain()
    tiny.submit([1], GREEDY, request_id="x")
    assert len(tiny.drain()) == 1


def test_unseeded_requests_differ_by_id_and_repeat_by_id(tiny: XlaBatchEngine) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    def tokens(request_id: str) -> tuple[int, ...]:
        tiny.submit([1, 2], params, request_id=request_id)
        return tiny.drain()[0].outputs[0].token_ids

    assert tokens("a") == tokens("a") != tokens("b")


def test_a_failed_step_ends_every_request_and_later_submits_fail(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    engine = make_engine()
    for index in range(12):
        engine.submit([index + 1], GREEDY, request_id=f"r{index}")
    engine.step()

    def broken(*_: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(engine.runner, "start", broken)
    outputs = engine.drain()
    assert {output.request_id for output in outputs} == {f"r{index}" for index in range(12)}
    assert all(o.outputs[0].finish_reason == "error" and "planted" in (o.error or "") for o in outputs)
    with pytest.raises(EngineClosedError, match="planted"):
        engine.submit([1], GREEDY)


def test_snapshot_tells_why(tiny: XlaBatchEngine) -> None:
    for index in range(TINY_ENGINE.max_num_seqs + 2):
        tiny.submit([index + 1] * 3, replace(GREEDY, max_tokens=30), request_id=f"r{index}")
    tiny.step()
    snapshot = tiny.snapshot()
    assert {view.request.request_id for view in snapshot.slots if view.request} == {
        f"r{n}" for n in range(TINY_ENGINE.max_num_seqs)
    }
    assert "no free slot" in str(snapshot)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"lag": -1},
        {"max_model_len": 1},
        {"prefill_lanes": ()},
        {"prefill_lanes": (8, 2)},
        {"key_buckets": (0,)},
        {"chunk_size": 3},
        {"max_num_seqs": 1.5},
    ],
)
def test_bad_configurations_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**fields)


def test_max_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 256"):
        EngineConfig(max_model_len=257).context_length(256)
    assert EngineConfig().context_length(131072) == 2048  # `resolve_length` may give more
    assert EngineConfig().buckets(1000) == (256, 512, 1024)
