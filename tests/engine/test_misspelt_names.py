"""Misspelt options and fields in Python get a suggestion, whatever call they are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import xla_engine.vllm
from tests.support.models import TINY_ENGINE, tiny_checkpoint
from xla_engine import LLM, EngineConfig, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [
        (LLM, "max_num_seq", "max_num_seqs"),
        (xla_engine.vllm.LLM, "max_num_seq", "max_num_seqs"),
        (EngineConfig, "max_num_seq", "max_num_seqs"),
        (SamplingParams, "temprature", "temperature"),
        (xla_engine.vllm.SamplingParams, "temprature", "temperature"),
        (StructuredOutputsParams, "jsn", "json"),
    ],
)
def test_a_misspelt_name_is_suggested(make: Callable[..., Any], wrong: str, right: str) -> None:
    with pytest.raises(
        (ConfigError, InvalidRequestError, TypeError), match=f"'{wrong}'; did you mean '{right}'"
    ):
        make(**{wrong: 1})


def test_options_of_a_request_are_suggested_and_count_by_value() -> None:
    with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE) as engine:
        message = r"submit\(\) has no option 'prority'; did you mean 'priority'"
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit([3, 1], SamplingParams(max_tokens=1), prority=1)  # type: ignore[call-arg]
        engine.submit([3, 1], SamplingParams(max_tokens=1), priority=2.0)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=r"priority must be an integer.*not 2\.5"):
            engine.submit([3, 1], SamplingParams(max_tokens=1), priority=2.5)  # type: ignore[arg-type]
        assert len(engine.drain()) == 1


def test_a_profiler_config_of_another_kind_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"profiler_config must be an object, .*torch_profiler_dir.*not 'text'"
    ):
        xla_engine.vllm.LLM(profiler_config="text")  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("pool", [{"num_blocks": 40}, {"kv_cache_memory_bytes": 1 << 20}])
def test_a_block_size_that_the_attention_cannot_have_is_a_sentence(pool: dict[str, int]) -> None:
    with XlaBatchEngine(
        tiny_checkpoint(), None, EngineConfig(block_size=16, max_num_seqs=2, max_model_len=64)
    ):
        pass  # without a pool there are no blocks
    try:
        with XlaBatchEngine(
            tiny_checkpoint(), None, EngineConfig(block_size=16, max_model_len=64, **pool)
        ) as engine:
            assert engine.runner.isa is None  # pure JAX has blocks of 16
    except ConfigError as error:
        assert "block_size must be one of 32, 64, 128, 256 here, not 16" in str(error)
        assert str(error).endswith("change block_size")
