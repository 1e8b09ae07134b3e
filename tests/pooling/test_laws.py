"""A vector's bits are a function of its prompt alone, and an engine that does not pool has nothing of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.device import program_code
from tests.support.models import BOTH_LANES, TINY, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.pooling_params import PoolingParams
from xla_engine.sampling_params import SamplingParams

DRAW = random.Random(7)
STEM = [DRAW.randrange(TINY.vocab_size) for _ in range(64)]
PROMPTS = [
    [*STEM[: DRAW.choice((0, 0, 20, 64))], *(DRAW.randrange(TINY.vocab_size) for _ in range(length))]
    for length in (1, 2, 15, 16, 17, 31, 33, 48, 60, 64, 90, 130, 200)
]
POOLS = replace(BOTH_LANES, runner="pooling")


def make(config: EngineConfig, kind: str) -> XlaBatchEngine:
    return XlaBatchEngine(tiny_checkpoint(), None, config, pooler=PoolingForm(pooling_type=kind))


def run(engine: XlaBatchEngine, prompts: list[list[int]], disturb: random.Random | None = None) -> list[Any]:
    """Outputs in order. disturb: prompts arrive while others run, and running ones lose their slots."""
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, PoolingParams(), request_id=f"r{at}")
        if disturb is not None and disturb.random() < 0.5:
            engine.advance()
            engine.preempt(f"r{disturb.randrange(at + 1)}", how=disturb.choice(engine.ways_to_preempt))
    outputs = {output.request_id: output for output in engine.drain()}
    return [outputs[f"r{at}"] for at in range(len(prompts))]


def alone(engine: XlaBatchEngine, prompts: list[list[int]]) -> list[Any]:
    """Each by itself, with nothing in the cache."""
    found = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        found += [output.pooled for output in run(engine, [prompt])]
    return found


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="slots"),
        pytest.param({"num_blocks": 40, "block_size": 32}, id="blocks", marks=pytest.mark.release),
        pytest.param(
            {"attention_backend": "xla", "linear_backend": "xla", "prefill_lanes": (1, 4)},
            id="xla",
            marks=pytest.mark.release,
        ),
    ],
)
def test_a_vector_depends_on_its_prompt_alone(kind: str, options: dict[str, Any]) -> None:
    """In any batch, slot, order and state of the cache, and after preemptions."""
    with make(replace(POOLS, **options), kind) as engine:
        expected = alone(engine, PROMPTS)
        assert len(set(expected)) == len(PROMPTS)
        warm = 0
        for seed in range(3):
            order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS)) * 2
            outputs = run(engine, [PROMPTS[at] for at in order], random.Random(seed))
            assert [output.pooled for output in outputs] == [expected[at] for at in order]
            warm += sum(output.num_cached_tokens for output in outputs)
            assert {output.outputs[0].token_ids for output in outputs} == {()}
        assert (warm > 0) == (kind == "LAST")  # a mean needs every position
        assert engine.runner.compiles.after == 0
        engine.scheduler.check()


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("LAST", marks=pytest.mark.release), "MEAN"])
def test_another_cut_into_chunks_changes_no_bit(kind: str) -> None:
    """Level B, with the C++ products: sums continue over the chunks position by position."""
    found = []
    for options in ({}, {"chunk_size": 48, "prefill_lanes": (3,)}):
        with make(replace(POOLS, **options), kind) as engine:
            if not engine.runner.has_one_row_code:
                pytest.skip("XLA's products serve")
            found.append(alone(engine, PROMPTS))
    assert found[0] == found[1]


def test_without_pooling_the_programs_are_what_they_were(shared_tiny: XlaBatchEngine) -> None:
    with make(replace(POOLS, self_check=False), "MEAN") as engine:
        names = [each.name for each in shared_tiny.inventory_report()]
        more = {each.name for each in engine.inventory_report()} - set(names)
        assert more == {"pool[lanes=2]", "pool[lanes=8]"}
        for name in names:
            assert program_code(engine.runner, name) == program_code(shared_tiny.runner, name), name
    with pytest.raises(InvalidRequestError, match="generates and does not pool"):
        shared_tiny.submit([1], PoolingParams())


def test_one_that_cannot_be_pooled_harms_no_other(tiny: XlaBatchEngine) -> None:
    weights = dict(tiny_checkpoint().weights)
    weights["embed"] = weights["embed"].copy()
    weights["embed"][3] = np.nan
    broken = replace(tiny_checkpoint(), weights=weights)
    with XlaBatchEngine(broken, None, replace(POOLS, self_check=False)) as engine:
        good, bad, again = run(engine, [[1, 2], [3], [1, 2]])
    assert (bad.pooled, bad.outputs[0].finish_reason) == (None, "error") and "not finite" in bad.error
    assert good.pooled == again.pooled and good.pooled is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1.0}, "temperature applies to generation only"),
        ({"logprobs": 1}, "logprobs applies to"),
        ({"task": "draw"}, "task must be"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4, "task": "score"}, "for embeddings"),
        ({"use_activation": "yes"}, "true or false"),
    ],
)
def test_params_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        PoolingParams(**fields)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_finished": 2},
        {"shadow_rate": 0.5},
        {"enable_lora": True},
        {"speculative_config": {"method": "suffix"}},
    ],
)
def test_options_of_text_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="applies to generation only"):
        replace(POOLS, **options)
    assert "runner" not in BOTH_LANES.options()


def test_sampling_params_are_no_pooling_params() -> None:
    assert PoolingParams().max_cached_tokens is None
    assert PoolingParams(pooling_type="MEAN").max_cached_tokens == 0
    with pytest.raises(InvalidRequestError, match="unknown field 'temperature'"):
        PoolingParams.from_mapping({"temperature": 1})
    with pytest.raises(InvalidRequestError, match="pooling runs on one engine"):
        PoolingParams().to_mapping()
    assert SamplingParams() != PoolingParams()
