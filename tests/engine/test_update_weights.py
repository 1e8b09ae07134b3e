"""New weights between two steps: the bits are those of an engine started with them, or an error changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import llama_checkpoint
from tests.support.engine_faults import bits
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.llm import LLM
from xla_engine.model_loader.checkpoint import Checkpoint, random_weights
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_tokens=12, logprobs=0, seed=7, ignore_eos=True)
PROMPT = list(range(40))
CONFIG = replace(TINY_ENGINE, prefill_lanes=(2,), keep_finished=4)
Q, K, V = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")


def other_checkpoint() -> Checkpoint:
    weights = random_weights(TINY, dtype="bfloat16", seed=2, scale=0.3)
    return replace(llama_checkpoint(), weights=weights)


def tensors_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by the names in its files, in float32."""
    found = {}
    for leaf, parts in checkpoint.sources.items():
        first = 0
        for source in parts:
            rows = checkpoint.weights[leaf][first : first + source.shape[0]]
            found[source.name] = np.asarray(rows, np.float32)
            first += source.shape[0]
    return found


def generated(engine: XlaBatchEngine) -> bytes:
    engine.submit(PROMPT, PARAMS, request_id="one")
    return bits(engine.drain()[0].outputs[0])


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.release)])
def test_the_bits_are_those_of_an_engine_started_from_the_new_checkpoint(quantization: str | None) -> None:
    config = replace(CONFIG, quantization=quantization)
    with XlaBatchEngine(other_checkpoint(), None, config) as fresh:
        expected = generated(fresh)
    with XlaBatchEngine(llama_checkpoint(), None, config) as engine:
        before, identity = generated(engine), engine.identity()
        assert before != expected
        compiled = compiles_of_this_thread()
        LLM.from_engine(engine).update_weights(tensors_of(other_checkpoint()).items())
        with pytest.raises(InvalidRequestError, match="cannot be continued"):
            engine.extend("one", 4)
        engine.submit(PROMPT, PARAMS, request_id="one")
        (output,) = engine.drain()
        assert bits(output.outputs[0]) == expected
        assert output.num_cached_tokens == 0, "old prefixes were used"
        assert engine.identity().differences(identity)
        engine.update_weights(tensors_of(llama_checkpoint()))
        assert generated(engine) == before
        assert compiles_of_this_thread() == compiled
        assert_all_or_nothing(engine, before)
        assert_refused_while_requests_run(engine, before)


def assert_all_or_nothing(engine: XlaBatchEngine, expected: bytes) -> None:
    tensors = tensors_of(other_checkpoint())
    bad: list[tuple[dict[str, Any], str]] = [
        ({"model.layers.9.mlp.down_proj.weight": tensors[Q]}, "no tensor 'model.layers.9"),
        ({Q: tensors[Q].T[:8]}, "as the checkpoint has it"),
        ({Q: tensors[Q].astype(np.int8)}, "is int8"),
        ({Q: tensors[Q] * np.float32(np.nan)}, "NaN"),
        ({K: None}, f"{K} is missing"),
    ]
    for change, match in bad:
        given = {name: each for name, each in {**tensors, **change}.items() if each is not None}
        with pytest.raises(CheckpointError, match=match):
            engine.update_weights(given)
        assert generated(engine) == expected
    engine.update_weights({name: tensors[name] for name in (Q, K, V)})  # whole weights may come alone
    assert generated(engine) != expected
    engine.update_weights(tensors_of(llama_checkpoint()))


def assert_refused_while_requests_run(engine: XlaBatchEngine, expected: bytes) -> None:
    engine.submit(PROMPT, PARAMS, request_id="one")
    engine.step()
    with pytest.raises(InvalidRequestError, match="requests are running or waiting"):
        engine.update_weights(tensors_of(other_checkpoint()))
    assert bits(engine.drain()[0].outputs[0]) == expected


def test_a_model_without_names_is_refused(tiny: XlaBatchEngine) -> None:
    with pytest.raises(CheckpointError, match="not loaded from files"):
        tiny.update_weights({Q: np.zeros((96, 48), np.float32)})
