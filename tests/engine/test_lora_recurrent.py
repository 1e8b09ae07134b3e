"""Adapters of models with recurrent layers change their projections, too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.test_lora import WITH_ADAPTERS, alone, ended, scores, submit_every
from tests.support.adapters import write_adapter
from tests.support.models import TINY, tiny_checkpoint
from tests.support.tiers import in_ci
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.lora.form import LoraForm, target_of
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.families import FAMILIES, tensor_sources
from xla_engine.model_loader.peft.adapter import read_adapter
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
NAMES = ["qwen3_5", "lfm2_bias", "falcon_h1", "granite_hybrid_dense", "olmo_hybrid", "mamba2"]
MODEL = replace(  # whole vectors throughout, as the C++ products need with adapters
    TINY,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    layer_types=("linear_attention", "full_attention"),
    attn_output_gate=True,
    qk_norm="head",
    delta=DeltaForm(key_heads=8, value_heads=16, key_dim=16, value_dim=32, kernel=4, norm_eps=1e-6),
)
PARAMS = SamplingParams(max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)


def modules_of(checkpoint: Checkpoint) -> list[str]:
    """The last names of all linear modules that adapters can change."""
    names = {
        source.name.split(".")[-2]
        for leaf, parts in checkpoint.sources.items()
        for source in parts
        if target_of(leaf) is not None
    }
    return sorted(names)


def merge(model: Path, adapter: Path, target: Path) -> Path:
    """Copy a checkpoint with W + s B A in place of W, in its own names and order of rows, in float32."""
    shutil.copytree(model, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(adapter / "adapter_model.safetensors")
    tensors = {
        name: np.asarray(each, np.float32) for name, each in load_file(model / "model.safetensors").items()
    }
    changed = 0
    for name in tensors:
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in pairs:
            tensors[name] = tensors[name] + config["lora_alpha"] / config["r"] * (
                pairs[f"{key}B.weight"] @ pairs[f"{key}A.weight"]
            )
            changed += 1
    assert 2 * changed == len(pairs)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.full
@pytest.mark.parametrize("name", in_ci(NAMES, ["qwen3_5", "falcon_h1"]))
def test_it_computes_what_the_merged_checkpoint_computes(name: str, tmp_path: Path) -> None:
    """In float32, with an adapter of every module that can have one."""
    checkpoint = load_checkpoint(GOLDEN / name, dtype="float32")
    modules = modules_of(checkpoint)
    assert any(each.startswith(("in_proj", "g_proj")) for each in modules), "recurrent layers are among them"
    path = write_adapter(tmp_path / "adapter", checkpoint, modules=modules, scales=(0.1, 0.1))
    merged = load_checkpoint(merge(GOLDEN / name, path, tmp_path / "merged"), dtype="float32")
    config = replace(WITH_ADAPTERS, max_model_len=128, self_check=False)
    prompt = list(range(40))
    with XlaBatchEngine(checkpoint, None, config) as adapting:
        adapting.submit(prompt, PARAMS, lora_request=LoRARequest("a", 1, str(path)))
        (one,) = adapting.drain()
        adapting.submit(prompt, PARAMS)
        (bare,) = adapting.drain()
    with XlaBatchEngine(merged, None, replace(config, enable_lora=False)) as whole:
        whole.submit(prompt, PARAMS)
        (other,) = whole.drain()
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    found, expected, without = (np.array(scores(output)) for output in (one, other, bare))
    np.testing.assert_allclose(found, expected, atol=5e-4)
    assert np.abs(found - without).max() > 0.1


def hybrid_checkpoint(model: ModelConfig = MODEL) -> Checkpoint:
    """A random model, as if it had been the files of a Qwen3.5."""
    sources = tensor_sources(model, FAMILIES["Qwen3_5ForCausalLM"])
    return replace(tiny_checkpoint(model=model), sources=sources)


def hybrid_adapters(folder: Path, checkpoint: Checkpoint) -> list[LoRARequest]:
    """Of all modules, of recurrent layers only, and of attention only."""
    chosen = (modules_of(checkpoint), ["in_proj_qkv", "in_proj_b", "out_proj"], ["q_proj", "v_proj"])
    paths = (
        write_adapter(folder / str(at), checkpoint, seed=at, rank=(8, 3, 16)[at], modules=modules)
        for at, modules in enumerate(chosen)
    )
    return [LoRARequest(f"adapter-{at}", at, str(path)) for at, path in enumerate(paths, 1)]


@pytest.mark.full
def test_a_mixed_batch_has_the_bits_of_each_request_alone(tmp_path: Path) -> None:
    """With the C++ layers and products, in any adapter slot, and again from cached prefixes."""
    checkpoint = hybrid_checkpoint()
    loras = hybrid_adapters(tmp_path, checkpoint)
    with XlaBatchEngine(checkpoint, None, WITH_ADAPTERS) as engine:
        expected = alone(engine, loras)
        assert len(set(expected.values())) > 15, "adapters change what comes"
        for number in engine.list_loras():
            engine.remove_lora(number)
        for lora in reversed(loras):  # other slots
            assert engine.add_lora(lora)
        engine.blank()
        for _ in range(2):
            submit_every(engine, loras)
            assert ended(engine) == expected
    with XlaBatchEngine(checkpoint, None, replace(WITH_ADAPTERS, enable_lora=False)) as bare:
        submit_every(bare, [])
        assert ended(bare).items() <= expected.items()


def test_every_part_of_a_projection_has_its_own_matrices(tmp_path: Path) -> None:
    checkpoint = hybrid_checkpoint()
    path = write_adapter(tmp_path / "a", checkpoint, rank=4, modules=["in_proj_qkv", "in_proj_a", "q_proj"])
    form = LoraForm(1, 8, np.dtype(np.float32), packed=False)
    leaves = read_adapter(path, checkpoint.sources, MODEL, form).leaves
    assert leaves["layers.0.delta.projected_lora_rank"].tolist() == [4, 4, 4, 0, 0, 4]
    assert leaves["layers.1.qkv_lora_rank"].tolist() == [4, 0, 0, 4]  # queries, keys, values, gates
    assert not leaves["layers.0.delta.output_lora_rank"].any()


def test_what_adapters_cannot_change_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = hybrid_checkpoint()
    name = "base_model.model.model.layers.0.linear_attn.conv1d.lora_"
    tensors = {
        f"{name}A.weight": np.zeros((8, 4), np.float32),
        f"{name}B.weight": np.zeros((64, 8), np.float32),
    }
    path = write_adapter(tmp_path / "conv", checkpoint, modules=["in_proj_z"], tensors=tensors)
    config = replace(WITH_ADAPTERS, self_check=False)
    with (
        XlaBatchEngine(checkpoint, None, config) as engine,
        pytest.raises(InvalidRequestError, match=r"conv1d.*merge_and_unload"),
    ):
        engine.add_lora(LoRARequest("conv", 1, str(path)))
    with pytest.raises(ConfigError, match="recurrent layers is for one device"):
        XlaBatchEngine(checkpoint, None, replace(config, tensor_parallel_size=2))
