"""The common beginning of prompts is computed once, and no bit changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.device import read_cache
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability.observer import Observer
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

MakeEngine = Callable[..., XlaBatchEngine]
DRAW = random.Random(3)
STEM = [DRAW.randrange(TINY.vocab_size) for _ in range(100)]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=8, logprobs=0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def by_xla() -> Iterator[XlaBatchEngine]:
    """Stale values would change this attention's results, so slots are cleared behind the reused prefix."""
    config = replace(TINY_ENGINE, attention_backend="xla", prefill_lanes=(8,), key_buckets=(512,))
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        yield engine


@pytest.fixture(params=["tiny", pytest.param("by_xla", marks=pytest.mark.full)])
def engine(request: pytest.FixtureRequest) -> XlaBatchEngine:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, XlaBatchEngine)
    return found


def run(
    engine: XlaBatchEngine, prompts: list[list[int]], params: SamplingParams = SAMPLED
) -> list[RequestOutput]:
    names = [engine.submit(prompt, params, request_id=f"r{at}") for at, prompt in enumerate(prompts)]
    outputs = {output.request_id: output for output in engine.drain()}
    return [outputs[name] for name in names]


def bits(output: RequestOutput) -> tuple[tuple[int, ...], bytes]:
    (only,) = output.outputs
    return only.token_ids, np.asarray(only.logprobs, np.float32).tobytes()


def cold(
    engine: XlaBatchEngine, prompts: list[list[int]], params: SamplingParams = SAMPLED
) -> list[RequestOutput]:
    """The results of each request alone, with empty slots."""
    outputs = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        outputs += run(engine, [prompt], params)
    engine.reset_prefix_cache()
    return outputs


def test_a_shared_stem_is_computed_once_and_the_bits_are_those_of_a_cold_run(engine: XlaBatchEngine) -> None:
    """More prompts than slots, all at once: they wait for the one that computes their common prefix."""
    prompts = [[*STEM, *(DRAW.randrange(TINY.vocab_size) for _ in range(1 + 7 * at))] for at in range(12)]
    expected = cold(engine, prompts)
    before = engine.stats()
    found = run(engine, prompts)
    after = engine.stats()
    assert [bits(output) for output in found] == [bits(output) for output in expected]
    assert [output.num_cached_tokens for output in found] == [0] + [96] * 11, "whole chunks of what is shared"
    assert after.cached_tokens - before.cached_tokens == 96 * 11
    assert after.prompt_tokens - before.prompt_tokens == sum(map(len, prompts)) - 96 * 11


def cached(engine: XlaBatchEngine, length: int) -> int:
    """Tokens of a prompt of `length` that need not run again when all are in a slot."""
    if engine.scheduler.config.cut_invariant:
        return length - 1
    return (length - 1) // engine.config.chunk_size * engine.config.chunk_size


def test_a_prompt_that_is_wholly_cached_computes_its_last_token_only(engine: XlaBatchEngine) -> None:
    """It computes its last chunk instead if the bits of a token may depend on its place in a chunk."""
    for length in (17, 64, 100):
        prompt = STEM[:length]
        (expected,) = cold(engine, [prompt])
        run(engine, [prompt])
        before = engine.stats().prompt_tokens
        (again,) = run(engine, [prompt])
        assert bits(again) == bits(expected)
        assert again.num_cached_tokens == cached(engine, length)
        assert engine.stats().prompt_tokens - before == length - cached(engine, length)


def test_the_operations_in_cpp_are_exact_for_any_cut(embedded: XlaBatchEngine) -> None:
    """A conversation continues from the generated tokens, and a fully cached prompt computes one token."""
    if not embedded.runner.has_one_row_code:
        pytest.skip("this machine has no C++ products")
    embedded.reset_prefix_cache()
    prompt = STEM[:70]
    (first,) = run(embedded, [prompt], replace(SAMPLED, max_tokens=60))
    conversation = [*prompt, *first.outputs[0].token_ids, 7, 8, 9]
    (found,) = run(embedded, [conversation])
    assert found.num_cached_tokens == 128, "70 + 59 tokens are in the slot, and 128 is the last cut before"
    (again,) = run(embedded, [conversation])
    assert again.num_cached_tokens == len(conversation) - 1
    (expected,) = cold(embedded, [conversation])
    assert bits(again) == bits(found) == bits(expected)


@pytest.mark.full
def test_generated_tokens_are_not_reused_where_a_probe_is_all_there_is(
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    engine = make_engine(replace(TINY_ENGINE, linear_backend="xla"))
    assert not engine.runner.has_one_row_code
    engine.reset_prefix_cache()
    (first,) = run(engine, [STEM[:40]], replace(SAMPLED, max_tokens=60))
    (found,) = run(engine, [[*STEM[:40], *first.outputs[0].token_ids]])
    assert found.num_cached_tokens == 32


def test_tenants_share_nothing(engine: XlaBatchEngine) -> None:
    engine.reset_prefix_cache()
    for salt, tokens in (("a", 0), ("b", 0), ("a", cached(engine, len(STEM)))):
        engine.submit(STEM, SAMPLED, request_id="x", cache_salt=salt)
        (output,) = engine.drain()
        assert output.num_cached_tokens == tokens


def test_prompt_logprobs_are_computed_and_not_skipped(engine: XlaBatchEngine) -> None:
    engine.reset_prefix_cache()
    run(engine, [STEM])
    (scored,) = run(engine, [STEM], replace(SAMPLED, prompt_logprobs=1))
    assert scored.num_cached_tokens == 0
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(STEM)


def test_penalties_count_the_cached_part_of_the_prompt(engine: XlaBatchEngine) -> None:
    """The history of tokens is reused with the prefix, in the same slot and in a copy."""
    params = replace(SAMPLED, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)
    prompts = [[*STEM, at] for at in range(9)]
    assert [bits(a) for a in cold(engine, prompts, params)] == [bits(a) for a in run(engine, prompts, params)]


def test_sequences_of_one_request_prefill_once(engine: XlaBatchEngine) -> None:
    engine.reset_prefix_cache()
    before = engine.stats().prompt_tokens
    engine.submit(STEM, replace(SAMPLED, n=4))
    engine.drain()
    assert engine.stats().prompt_tokens - before == len(STEM) + 3 * (len(STEM) - cached(engine, len(STEM)))


def test_in_place_nothing_moves(engine: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit in a free slot runs in that slot; a hit in a busy one is copied, and its bytes stay."""
    engine.reset_prefix_cache()
    reuses = []
    engine.observers.add(observer := Observer(started=lambda plan: reuses.extend(plan.moves.reuses)))
    run(engine, [STEM])
    run(engine, [STEM])
    ((place, source),) = {(reuse.slot.index, reuse.source) for reuse in reuses}
    assert place == source
    reuses.clear()
    engine.submit([*STEM, 1], replace(SAMPLED, max_tokens=30), request_id="live")
    for _ in range(4):
        engine.step()
    held = [np.array(keys[source]) for keys, _ in read_cache(engine.runner)]
    run(engine, [[*STEM, 2]], replace(SAMPLED, max_tokens=1))
    engine.observers.remove(observer)
    assert [(reuse.source, reuse.slot.index != source) for reuse in reuses] == [
        (source, False),
        (source, True),
    ]
    for before, (keys, _) in zip(held, read_cache(engine.runner), strict=True):
        assert before[:, : len(STEM)].tobytes() == np.array(keys[source])[:, : len(STEM)].tobytes()


def test_off_means_off(make_engine: Callable[..., XlaBatchEngine]) -> None:
    config = replace(TINY_ENGINE, enable_prefix_caching=False, prefill_lanes=(8,), preemption=False)
    engine = make_engine(config)
    assert "copy_span" not in {report.name for report in engine.inventory_report()}
    run(engine, [STEM])
    assert run(engine, [STEM])[0].num_cached_tokens == 0
