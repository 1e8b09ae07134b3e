"""An extended request returns the same as one longer request, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine_faults import fail_at
from tests.support.models import BOTH_LANES
from tests.support.requests import PROMPTS, comparable
from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError, TokenLimitError
from xla_engine.llm import LLM
from xla_engine.observability.observer import Observer
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Plan

MakeEngine = Callable[..., XlaBatchEngine]
KEEPS = replace(BOTH_LANES, max_num_seqs=4, keep_finished=64, block_size=32)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1, "logprobs": 2, "stop_token_ids": [7, 11]},
    {"temperature": 1.0, "seed": 2, "n": 3, "stop_token_ids": [5, 9, 30, 31]},
    {
        "temperature": 1.2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 4.0, 5: -4.0},
        "top_k": 40,
        "top_p": 0.9,
    },
    {"temperature": 0.7, "allowed_token_ids": list(range(40, 90)), "prompt_logprobs": 1},
]
TINY_CASES = {f"{at}/{kind}": (prompt, KINDS[kind]) for at, prompt in enumerate(PROMPTS) for kind in range(5)}
TEXT_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": ("def fib(n):", {"temperature": 0}),
    "stop": ("import ", {"temperature": 0.8, "stop": ["\n\n", "return x", "self.b"], "min_tokens": 3}),
    "bytes": ("é", {"temperature": 2.5, "n": 2}),
    "bad words": ("def f(self", {"temperature": 0.9, "bad_words": ["self", "return"]}),
    "regex": ("x = ", {"temperature": 1.0, "structured_outputs": {"regex": "[a-z_ ]{3,30}"}}),
    "json": ("{", {"temperature": 1.0, "structured_outputs": {"json_object": True}}),
}


def params(kind: dict[str, Any], tokens: int) -> SamplingParams:
    defaults = {"logprobs": 0, "ignore_eos": "structured_outputs" not in kind}
    return SamplingParams.from_mapping({**defaults, **kind, "max_tokens": tokens})


def whole(engine: XlaBatchEngine, cases: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What each request returns alone and in one piece."""
    found = {}
    for name, (prompt, kind) in cases.items():
        engine.reset_prefix_cache()
        engine.submit(prompt, params(kind, tokens), request_id=name)
        (output,) = engine.drain()
        found[name] = comparable(output)
    return found


def in_pieces(
    engine: XlaBatchEngine, cases: dict[str, Any], pieces: tuple[int, ...], draw: random.Random
) -> tuple[dict[str, Any], Counter[str]]:
    """The results of requests that are extended again and again at random turns, and the scheduler's decisions."""
    actions: Counter[str] = Counter()

    def count(plan: Plan) -> None:
        actions.update(each.action for each in plan.decisions)
        actions["replays"] += len(plan.moves.replays)

    engine.observers.add(observer := Observer(started=count))
    left = {name: list(pieces) for name in cases}
    new, ready = draw.sample(list(cases), len(cases)), list[str]()
    results: dict[str, Any] = {}
    while new or ready or engine.has_unfinished:
        live = engine.num_running + engine.num_waiting
        if new and draw.random() < 0.4 and live < draw.choice((1, 2, 9)):
            name = new.pop()
            prompt, kind = cases[name]
            engine.submit(prompt, params(kind, left[name].pop(0)), request_id=name)
        while ready and draw.random() < 0.5:
            name = ready.pop(draw.randrange(len(ready)))
            engine.extend(name, left[name].pop(0))
        for output in engine.step(only_finished=draw.random() < 0.5):
            if not output.finished:
                continue
            ended = {each.finish_reason for each in output.outputs}
            if left[output.request_id] and "length" in ended:
                ready.append(output.request_id)
            else:
                results[output.request_id] = comparable(output)
        engine.scheduler.check()
    engine.observers.remove(observer)
    return results, actions


@pytest.mark.parametrize(
    ("num_blocks", "lag"),
    [
        (24, 2),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in ((None, 0), (None, 1), (None, 2), (24, 0), (24, 1))
        ),
    ],
)
def test_pieces_add_up_to_the_longer_request(
    make_engine: MakeEngine, num_blocks: int | None, lag: int
) -> None:
    engine = make_engine(replace(KEEPS, num_blocks=num_blocks))
    expected = whole(engine, TINY_CASES, 24)
    engine.lag = lag
    found, actions = in_pieces(engine, TINY_CASES, (9, 1, 14), random.Random(lag))
    assert found == expected
    assert actions["continue"] > 5 and actions["prefill"] > len(TINY_CASES), actions
    assert engine.stats().compiles_after_warmup == 0


@pytest.mark.full
def test_where_prefill_has_other_bits_the_tokens_are_sampled_again(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(KEEPS, attention_backend="xla", prefill_lanes=(8,), key_buckets=(512,)))
    assert not engine.scheduler.config.keeps_tokens
    expected = whole(engine, TINY_CASES, 24)
    found, actions = in_pieces(engine, TINY_CASES, (9, 1, 3, 3, 4, 4), random.Random(3))
    assert found == expected and actions["continue"] > 10 and actions["replays"] > 10, actions


@pytest.mark.full
def test_text_stops_and_grammars_with_and_without_speculation(make_text_engine: MakeEngine) -> None:
    pytest.importorskip("llguidance")
    plain = make_text_engine(EngineConfig(max_num_seqs=4, max_model_len=256, keep_finished=16))
    expected = whole(plain, TEXT_CASES, 40)
    for seed in range(2):
        found, actions = in_pieces(plain, TEXT_CASES, (3, 1, 16, 20), random.Random(seed))
        assert found == expected and actions["continue"] > 5, actions
    if not plain.runner.has_one_row_code:
        return
    guessing = make_text_engine(
        replace(plain.config, speculative_config={"method": "suffix", "num_speculative_tokens": 3})
    )
    for lag in range(3):
        guessing.lag = lag
        found, actions = in_pieces(guessing, TEXT_CASES, (3, 1, 16, 20), random.Random(7 + lag))
        assert found == expected and actions["continue"] > 2, actions
    assert guessing.stats().accepted_tokens > 0


@pytest.fixture
def make_text_engine() -> Any:
    engines: list[XlaBatchEngine] = []

    def make(config: EngineConfig) -> XlaBatchEngine:
        engines.append(XlaBatchEngine.from_pretrained(None, config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.timeout(60)
def test_an_idle_engine_goes_on_with_a_constrained_request(make_text_engine: MakeEngine) -> None:
    """Its mask is still to be made, and nothing else would wake the engine for it."""
    pytest.importorskip("llguidance")
    engine = make_text_engine(EngineConfig(max_num_seqs=1, max_model_len=64, keep_finished=1))
    engine.submit("x = ", params(TEXT_CASES["regex"][1], 3), request_id="a")
    engine.drain()
    while not engine.state.idle:
        engine.step()
    engine.extend("a", 3)
    (output,) = engine.drain()
    assert len(output.outputs[0].token_ids) == 6


def test_after_an_abort_a_fault_and_a_blank_cache(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these cases the content of the slot is lost; the stream is the same nevertheless."""
    engine = make_engine(KEEPS)
    (expected,) = whole(engine, {"a": (PROMPTS[4], KINDS[3])}, 30).values()

    def first(tokens: int = 12) -> None:
        engine.submit(PROMPTS[4], params(KINDS[3], tokens), request_id="a")

    first(20)
    for _ in range(12):
        engine.step()
    engine.abort("a")
    (output,) = engine.drain()
    had = len(output.outputs[0].token_ids)
    assert 0 < had < 20
    engine.extend("a", 30 - had)
    assert comparable(engine.drain()[0]) == expected

    first()
    engine.drain()
    engine.submit(PROMPTS[1], params(KINDS[0], 4), request_id="other")
    fail_at(monkeypatch, engine, "wait", {2}, RuntimeError("lost"))
    engine.drain()
    assert engine.stats().recoveries == 1
    engine.extend("a", 18)
    assert comparable(engine.drain()[0]) == expected

    first()
    engine.drain()
    engine.blank()
    engine.extend("a", 10)
    engine.step()
    engine.step()
    engine.preempt("a")  # and it may lose its slot again
    engine.drain()
    engine.extend("a", 8)
    assert comparable(engine.drain()[0]) == expected


def test_the_oldest_are_forgotten_and_what_is_over_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(KEEPS, keep_finished=2))
    for name in "abc":
        engine.submit([1, 2, 3], params(KINDS[0], 4), request_id=name)
        engine.drain()
    assert set(engine.scheduler.ended) == {"b", "c"}
    with pytest.raises(InvalidRequestError, match="last 2 are kept"):
        engine.extend("a", 1)
    (output,) = (engine.extend("b", 1), engine.drain())[1]
    stop = output.outputs[0].token_ids[2]
    engine.submit([1, 2, 3], params({"temperature": 0, "stop_token_ids": [stop]}, 9), request_id="c")
    assert engine.drain()[0].outputs[0].finish_reason == "stop"
    with pytest.raises(InvalidRequestError, match="ended with stop"):
        engine.extend("c", 1)
    assert set(engine.scheduler.ended) == {"b"}
    with pytest.raises(TokenLimitError, match="max_model_len"):
        engine.extend("b", 300)
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        engine.extend("b", 1, cache_salt="x")
    with pytest.raises(InvalidRequestError, match="round_robin"):
        engine.extend("b", 1, quantum=3)


def test_an_engine_that_keeps_nothing_says_so_and_has_the_programs_it_had(tiny: XlaBatchEngine) -> None:
    assert not any("continue" in report.name for report in tiny.inventory_report())
    assert "keep_finished" not in tiny.config.options()
    tiny.submit([1, 2], params(KINDS[0], 2), request_id="a")
    tiny.drain()
    assert not tiny.scheduler.ended
    with pytest.raises(InvalidRequestError, match="keep_finished"):
        tiny.extend("a", 1)
    with pytest.raises(ConfigError, match="keep_finished"):
        EngineConfig(keep_finished=-1)


def test_llm_and_async_llm(make_engine: MakeEngine) -> None:
    engine = make_engine(KEEPS)
    whole_one = comparable(
        LLM.from_engine(engine).generate([[1, 2, 3]], params(KINDS[3], 16), use_tqdm=False)[0]
    )
    llm = LLM.from_engine(engine)
    seeded = {**KINDS[3], "seed": 5}
    longer = [comparable(each) for each in llm.generate([[1, 2], [3]], params(seeded, 16), use_tqdm=False)]
    outputs = llm.generate([[1, 2], [3]], params(seeded, 6), use_tqdm=False)
    assert [comparable(each) for each in llm.extend(outputs, 10, use_tqdm=False)] == longer
    assert comparable(llm.extend(outputs[1], 1, use_tqdm=False)[0]) != longer[1] and whole_one

    async def talk() -> list[Any]:
        async_llm, seen = AsyncLLM.from_engine(engine), []
        async for output in async_llm.generate([1, 2], params(seeded, 6), request_id="talk"):
            seen.append(output)
        async for output in async_llm.extend("talk", 10):
            seen.append(output)
        return seen

    seen = asyncio.run(talk())
    assert [output.finished for output in seen].count(True) == 2 and comparable(seen[-1]) == longer[0]
    counts = [len(output.outputs[0].token_ids) for output in seen]
    assert counts == sorted(counts)


def test_a_request_may_have_turns_of_its_own_length(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(KEEPS, max_num_seqs=1, scheduling_policy="round_robin", quantum=50))
    parked: Counter[str] = Counter()

    def see(plan: Plan) -> None:
        parked.update(each.request_id for each in plan.decisions if each.action == "park")

    engine.observers.add(Observer(started=see))
    expected = whole(engine, {"long": ([1, 2], KINDS[3]), "short": ([3, 4], KINDS[3])}, 40)
    engine.submit([3, 4], params(KINDS[3], 40), request_id="short", quantum=5)
    engine.submit([1, 2], params(KINDS[3], 40), request_id="long")
    assert {output.request_id: comparable(output) for output in engine.drain()} == expected
    assert parked == {"short": 1}  # after 5 steps; the other one ends within its turn
    with pytest.raises(InvalidRequestError, match="quantum"):
        engine.submit([1], params(KINDS[0], 1), quantum=0)
