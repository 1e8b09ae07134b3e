"""Adapters of models with routed experts change attention, and the MLPs of layers without experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_lora import WITH_ADAPTERS, alone, ended, scores, submit_every
from tests.engine.test_lora_recurrent import GOLDEN, PARAMS, merge, modules_of
from tests.support.adapters import MODULES, llama_checkpoint, write_adapter
from tests.support.tensor_parallel_adapters import MODELS
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.peft.request import LoRARequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


NAMES = ["qwen3_moe", "glm4_moe"]
OTHERS = ["granite_hybrid", "mixtral", "gpt_oss", "gemma4_moe", "qwen3_5_moe", "lfm2_moe"]


@pytest.mark.parametrize(
    "name", [*default(NAMES), *(pytest.param(name, marks=pytest.mark.release) for name in OTHERS)]
)
def test_it_computes_what_the_merged_checkpoint_computes(name: str, tmp_path: Path) -> None:
    """In float32, with an adapter of every module that can have one; another one of an expert is refused."""
    checkpoint = load_checkpoint(GOLDEN / name, dtype="float32")
    modules = modules_of(checkpoint)
    assert {"q_proj", "v_proj"} <= {*modules}
    path = write_adapter(tmp_path / "adapter", checkpoint, modules=modules, scales=(0.1, 0.1))
    merged = load_checkpoint(merge(GOLDEN / name, path, tmp_path / "merged"), dtype="float32")
    expert = "base_model.model.model.layers.1.mlp.experts.0.down_proj.lora_"
    tensors = {expert + f"{which}.weight": np.zeros((8, 8), np.float32) for which in "AB"}
    other = write_adapter(tmp_path / "expert", checkpoint, modules=["q_proj"], tensors=tensors)
    config = replace(WITH_ADAPTERS, max_model_len=128, self_check=False)
    prompt = list(range(40))
    with XlaBatchEngine(checkpoint, None, config) as adapting:
        adapting.submit(prompt, PARAMS, lora_request=LoRARequest("a", 1, str(path)))
        (one,) = adapting.drain()
        adapting.submit(prompt, PARAMS)
        (bare,) = adapting.drain()
        with pytest.raises(InvalidRequestError, match=r"experts\.0\.down_proj.*without experts.*merge"):
            adapting.add_lora(LoRARequest("expert", 2, str(other)))
    with XlaBatchEngine(merged, None, replace(config, enable_lora=False)) as whole:
        whole.submit(prompt, PARAMS)
        (expected,) = whole.drain()
    assert one.outputs[0].token_ids == expected.outputs[0].token_ids
    found, wanted, without = (np.array(scores(output)) for output in (one, expected, bare))
    np.testing.assert_allclose(found, wanted, atol=5e-4)
    assert np.abs(found - without).max() > 0.1


@pytest.mark.full
def test_a_mixed_batch_has_the_bits_of_each_request_alone(tmp_path: Path) -> None:
    """With the C++ experts and products. Layer 1 has an MLP, which some adapters change."""
    model, family = MODELS["routed"]
    checkpoint = llama_checkpoint(model=model, family=family)
    loras = [
        LoRARequest(
            f"adapter-{at}",
            at,
            str(write_adapter(tmp_path / str(at), checkpoint, seed=at, rank=rank, modules=names)),
        )
        for at, rank, names in ((1, 8, MODULES), (2, 3, ("q_proj", "v_proj")), (3, 16, ATTENTION))
    ]
    with XlaBatchEngine(checkpoint, None, WITH_ADAPTERS) as engine:
        assert engine.runner.platform["linear"] == "native"
        expected = alone(engine, loras)
        assert len(set(expected.values())) > 15, "adapters change what comes"
        engine.blank()
        for _ in range(2):
            submit_every(engine, loras)
            assert ended(engine) == expected
    with XlaBatchEngine(checkpoint, None, replace(WITH_ADAPTERS, enable_lora=False)) as bare:
        submit_every(bare, [])
        assert ended(bare).items() <= expected.items()
