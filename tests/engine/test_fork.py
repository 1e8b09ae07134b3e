"""Saved requests continue with the bits of the original, and a fork equals the request with the longer prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.test_extend import KEEPS, KINDS, params, whole
from tests.support.requests import PROMPTS, comparable
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

MakeEngine = Callable[..., XlaBatchEngine]
CASES = {f"{at}/{kind}": (PROMPTS[at], KINDS[kind]) for at in (0, 2, 4) for kind in range(5)}
XLA = replace(KEEPS, attention_backend="xla", prefill_lanes=(8,), key_buckets=(512,))


def ended(outputs: list[RequestOutput]) -> dict[str, Any]:
    return {output.request_id: comparable(output) for output in outputs if output.finished}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(KEEPS, id="slots", marks=pytest.mark.full),
        pytest.param(replace(KEEPS, num_blocks=24), id="blocks"),  # as many as the tests of `extend` have
        pytest.param(XLA, id="no recompute", marks=pytest.mark.full),
    ],
)
def test_what_is_saved_at_any_time_goes_on_as_the_request_does(
    make_engine: MakeEngine, config: EngineConfig
) -> None:
    engine = make_engine(config)
    expected = whole(engine, CASES, 20)
    draw = random.Random(4)
    for name, (prompt, kind) in CASES.items():
        engine.submit(prompt, params(kind, 20), request_id=name)
    saved: dict[str, str] = {}
    found: dict[str, Any] = {}
    while engine.has_unfinished:
        found |= ended(engine.step(only_finished=draw.random() < 0.5))
        for name in CASES:
            if name not in saved and name not in found and draw.random() < 0.1:
                saved[name] = engine.save(name)
    assert found == expected and len(saved) > 8 and len(engine.saved) == len(saved)
    for again in range(2):
        restored = {engine.restore(kept, request_id=f"{name}+{again}"): name for name, kept in saved.items()}
        outputs = ended(engine.drain())
        assert {restored[name]: value for name, value in outputs.items()} == {
            name: expected[name] for name in saved
        }
    engine.scheduler.check()
    assert all(engine.free(kept) for kept in saved.values()) and engine.saved == ()
    assert engine.stats().compiles_after_warmup == 0


def test_a_saved_request_may_get_more_tokens_than_it_had(make_engine: MakeEngine) -> None:
    engine = make_engine(KEEPS)
    (expected,) = whole(engine, {"a": (PROMPTS[3], KINDS[3])}, 30).values()
    engine.submit(PROMPTS[3], params(KINDS[3], 10), request_id="a")
    engine.drain()
    assert engine.save("a", "ten") == "ten"
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        engine.restore("ten")  # it had all its tokens
    engine.restore("ten", 20, request_id="b")
    assert ended(engine.drain()) == {"b": expected}
    engine.extend("a", 20)
    assert ended(engine.drain()) == {"a": expected}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(KEEPS, id="slots", marks=pytest.mark.full),
        pytest.param(replace(KEEPS, num_blocks=24), id="blocks"),
    ],
)
def test_a_fork_is_the_request_with_the_longer_prompt(make_engine: MakeEngine, config: EngineConfig) -> None:
    """Fork live, finished and saved requests; their KV cache is not computed again."""
    engine = make_engine(config)
    draw = random.Random(2)
    found, prompts, wanted = {}, {}, {}
    for name, (prompt, kind) in CASES.items():
        engine.submit(prompt, params(kind, 20), request_id=name)
        for _ in range(draw.randrange(25)):
            found |= ended(engine.step())
        if name not in found and draw.random() < 0.5:
            source, output = engine.save(name), None
        else:
            source = name
        suffix = [draw.randrange(199) for _ in range(draw.randrange(4))]
        index = 2 if kind.get("n") else 0
        seed = draw.randrange(1000)
        new = params({**kind, "n": 1}, 12) if draw.random() < 0.5 else None
        fork = engine.fork(
            source,
            suffix,
            new,
            seed=None if kind["temperature"] == 0 else seed,
            index=index,
            request_id=f"{name}!",
        )
        request = engine.scheduler.states[fork].request
        row = engine.state.table.settings[fork]
        tokens = request.prompt_token_ids
        assert list(tokens[: len(prompt)]) == prompt and list(tokens[len(tokens) - len(suffix) :]) == suffix
        prompts[fork], wanted[fork] = tokens, replace(row.params, seed=row.seed)
    found |= ended(engine.drain())
    for fork, tokens in prompts.items():
        engine.reset_prefix_cache()
        engine.submit(tokens, wanted[fork], request_id="alone")
        (output,) = engine.drain()
        assert comparable(output) == found[fork], fork


def test_a_fork_of_what_a_slot_holds_computes_no_prompt_again(make_engine: MakeEngine) -> None:
    engine = make_engine(KEEPS)
    if not engine.scheduler.config.keeps_tokens:
        pytest.skip("prefill has other bits than decode here, so that generated tokens are computed again")
    prompt = PROMPTS[4]
    engine.submit(prompt, params(KINDS[1], 20), request_id="a")
    engine.drain()
    before = engine.stats()
    for seed in range(3):
        engine.fork("a", [5, 6], seed=seed)
    engine.drain()
    computed = engine.stats().prompt_tokens - before.prompt_tokens
    assert engine.stats().cached_tokens - before.cached_tokens > 3 * len(prompt)
    assert computed <= 3 * (2 + TINY_CHUNK)


TINY_CHUNK = KEEPS.chunk_size


def test_text_and_noise_of_a_fork(embedded: XlaBatchEngine) -> None:
    """A fork without a suffix continues like its source; a running source needs no `keep_finished`."""
    assert embedded.config.keep_finished == 0
    wanted = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)
    embedded.submit("def area(", wanted, request_id="a")
    for _ in range(10):
        embedded.step()
    fork = embedded.fork("a")
    other = embedded.fork("a", " # now", seed=9)
    outputs = {output.request_id: output for output in embedded.drain()}
    whole_one, forked = outputs["a"].outputs[0], outputs[fork]
    had = len(forked.prompt_token_ids) - len(outputs["a"].prompt_token_ids)
    assert 0 < had < 24
    if embedded.runner.has_one_row_code:
        assert forked.outputs[0].token_ids[: 24 - had] == whole_one.token_ids[had:]
    assert embedded.tokenizer is not None
    assert embedded.tokenizer.decode(outputs[other].prompt_token_ids).endswith(" # now")
    with pytest.raises(InvalidRequestError, match="keep_finished"):
        embedded.save("a")
    with pytest.raises(InvalidRequestError, match="keep_finished"):
        embedded.fork("a")


def test_what_cannot_be_is_refused_and_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(KEEPS, keep_finished=2))
    engine.submit([1, 2], params(KINDS[2], 30), request_id="a")
    engine.step()
    for _ in range(2):
        engine.save("a")
    with pytest.raises(InvalidRequestError, match="2 requests are saved"):
        engine.save("a")
    assert engine.free("a@0") and not engine.free("a@0")
    for wrong in (
        lambda: engine.save("a", "a@1"),
        lambda: engine.save("unknown"),
        lambda: engine.restore("a@0"),
        lambda: engine.restore("a@1", 0),
        lambda: engine.restore("a@1", request_id="a"),
        lambda: engine.restore("a@1", cache_salt="x"),
        lambda: engine.fork("unknown"),
        lambda: engine.fork("a", index=3),
        lambda: engine.fork("a", [199]),
        lambda: engine.fork("a", "text"),
    ):
        with pytest.raises(InvalidRequestError):
            wrong()
    for too_long in (lambda: engine.restore("a@1", 400), lambda: engine.fork("a", [1] * 400)):
        with pytest.raises(TokenLimitError):
            too_long()
    assert engine.num_running + engine.num_waiting == 3
    assert len(engine.drain()) == 1
    engine.scheduler.check()
