"""Families whose GGUF files need more than names: flags that the metadata do not have, windows by layer, DeltaNet
layers, and layers that predict further tokens. Weights have the bits of the safetensors files they were made of."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tests.support.gguf_checks import GOLDEN, assert_refused
from tests.support.gguf_files import GEMMA3N, GEMMA4, GEMMA4_KEYS, Kind, write_gguf, write_random
from xla_engine import LLM, SamplingParams
from xla_engine.cli import main
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint
from xla_engine.model_loader.families.gguf_tensors import log_decay
from xla_engine.model_loader.gguf import architectures
from xla_engine.runner.drafting.proposers import load_mtp

GLM4_MOE = {  # metadata of mixtures whose experts are chosen by sigmoids
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}
DEEPSEEK2 = {  # as newer files have it: one key head for all queries, and the model's own widths beside it
    "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": 28,
    "attention.head_count_kv": 1,
    "attention.key_length": 36,
    "attention.value_length": 28,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 14,
    "rope.dimension_count": 8,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_gating_func": 1,
}
DEEPSEEK2_OLD = {  # before llama.cpp had latent attention
    **{key: value for key, value in DEEPSEEK2.items() if not key.endswith(("_mla", "gating_func"))},
    "attention.head_count_kv": 5,
    "attention.key_length": 20,
    "attention.value_length": 14,
}
GLM4_LITE = {
    **DEEPSEEK2,
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.value_length_mla": 16,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.8,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}
GROUPS_V2 = {
    **DEEPSEEK2_OLD,
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 24,
    "attention.head_count_kv": 4,
    "attention.key_length": 16,
    "attention.value_length": 12,
    "expert_shared_count": 1,
    "expert_weights_scale": 4.0,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
GROUPS_V3 = {
    **GROUPS_V2,
    "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": 28,
    "attention.head_count_kv": 3,
    "attention.value_length": 16,
    "rope.dimension_count": 4,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 3,
}
MOONLIGHT = {
    **GLM4_LITE,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 24,
    "expert_weights_scale": 2.5,
}
GRANITE_HYBRID = {"expert_shared_feed_forward_length": 36, "rope.scaling.finetuned": False}
GEMMA4_MOE = {
    **GEMMA4_KEYS,
    "attention.head_count_kv": [2, 2, 1],
    "attention.sliding_window_pattern": [True, True, False],
}
EXAONE = {"attention.sliding_window_pattern": [True, False, True]}
PICTURES = {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3}
THIRD = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 6,
    **THIRD,
}


def assert_same(stored: Checkpoint, source: Checkpoint) -> None:
    assert replace(stored.config, rope_interleaved=source.config.rope_interleaved) == source.config, (
        asdict(stored.config),
        asdict(source.config),
    )
    assert stored.weights.keys() == source.weights.keys()
    for leaf in source.weights:
        np.testing.assert_array_equal(stored.weights[leaf], source.weights[leaf], err_msg=leaf)


@pytest.mark.parametrize(
    ("name", "arch", "extra"),
    [
        ("seed_oss", "seed_oss", {}),
        ("ernie4_5", "ernie4_5", {}),
        ("exaone4", "exaone4", EXAONE),
        ("exaone4_full", "exaone4", {}),
        ("glm4", "glm4", {}),
        ("gemma3n", "gemma3n", GEMMA3N),
        ("gemma4", "gemma4", GEMMA4),
        ("gemma4_keys", "gemma4", GEMMA4_KEYS),
        ("gemma4_moe", "gemma4", GEMMA4_MOE),
        ("glm4_moe", "glm4moe", GLM4_MOE),
        ("deepseek_v2", "deepseek2", DEEPSEEK2),
        ("deepseek_v2", "deepseek2", DEEPSEEK2_OLD),
        ("deepseek_v2_groups", "deepseek2", GROUPS_V2),
        ("deepseek_v3_groups", "deepseek2", GROUPS_V3),
        ("glm4_moe_lite", "deepseek2", GLM4_LITE),
        ("nemotron_h", "nemotron_h", {"feed_forward_length": [0, 44, 0, 0, 44]}),
        ("mamba2", "mamba2", {}),
        ("granite_hybrid", "granitehybrid", GRANITE_HYBRID),
        ("hunyuan", "hunyuan-dense", {}),
        ("ministral3", "mistral3", {}),
        ("stablelm", "stablelm", {"use_parallel_residual": True}),  # as files say that do not have it
        ("stablelm_parallel", "stablelm", {"use_parallel_residual": True}),
        ("phi", "phi2", {}),
        ("qwen3", "qwen3vl", PICTURES),
        ("qwen3_5", "qwen35", {}),
        ("qwen3_next", "qwen3next", {}),
        ("lfm2_bias", "lfm2", {}),
    ],
)
def test_a_float32_file_has_the_bits_of_its_source(
    name: str, arch: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "families" / name, model)
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(  # the one that divisors of frequencies are recognised by
        re.sub(r'"original_max_position_embeddings": \d+', '"original_max_position_embeddings": 8192', text)
    )
    path = write_gguf(model, tmp_path / "m.gguf", arch=arch, extra=extra)
    assert_same(load_checkpoint(path), load_checkpoint(model, dtype="float32"))
    found = CliRunner().invoke(main, ["inspect", str(path)])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    ("name", "arch", "fields"),
    [
        ("qwen3_5_moe", "qwen35moe", {**THIRD, "linear_num_value_heads": 6}),
        ("qwen3_5_moe", "qwen35moe", THIRD),  # as many key heads as value heads
        ("lfm2_moe", "lfm2moe", {"routed_scaling_factor": 1.0}),  # which no file has
        ("glm4", "glm4", {"attention_bias": False}),
        ("cohere2", "cohere2", {"sliding_window_pattern": 4, "layer_types": None, "num_hidden_layers": 5}),
        ("starcoder2", "starcoder2", {"sliding_window": None}),  # llama.cpp has no window here
        ("glm4_moe", "glm4moe", {"n_shared_experts": 1, "use_qk_norm": False, "routed_scaling_factor": 1.0}),
        ("seed_oss", "seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
        ("ernie4_5", "ernie4_5", {"use_bias": True}),
    ],
)
def test_random_weights_too(name: str, arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = write_random(tmp_path / "model", name, **fields)
    path = write_gguf(model, tmp_path / "m.gguf", arch=arch)
    assert_same(load_checkpoint(path), load_checkpoint(model))


@pytest.mark.parametrize("rotates", [True, False])
def test_granite_without_experts(rotates: bool, tmp_path: Path) -> None:
    """The shared MLP is the only one; a flag tells whether positions rotate."""
    kind = "rope" if rotates else "nope"
    fields = {"mamba_proj_bias": False, "position_embedding_type": kind, "mamba_conv_bias": rotates}
    model = write_random(tmp_path / "model", "granite_hybrid_dense", **fields)
    extra = {
        "expert_shared_feed_forward_length": 36,
        "rope.scaling.finetuned": rotates,
        "expert_used_count": 2,
    }
    path = write_gguf(model, tmp_path / "m.gguf", arch="granitehybrid", extra=extra)
    assert_same(load_checkpoint(path), load_checkpoint(model))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"feed_forward_length": ["a", "b", "c", "d", "e"]}, "intermediate_size"),
        ({"pooling_type": [1, 2]}, "pooling_type = [1, 2]"),
        ({"ssm.time_step_rank": 0}, "mamba_num_heads"),
    ],
)
def test_damaged_metadata_are_refused(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    model = GOLDEN / "families" / "nemotron_h"
    extra = {"feed_forward_length": [0, 44, 0, 0, 44]} | change
    assert_refused(write_gguf(model, tmp_path / "m.gguf", arch="nemotron_h", extra=extra), word)


def test_nemotron_3(tmp_path: Path) -> None:
    """Experts without a gate, between two products."""
    model = write_random(tmp_path / "model", "nemotron_3_latent", intermediate_size=32)
    extra = {
        "feed_forward_length": [0, 32, 0, 32],
        "expert_shared_feed_forward_length": 20,
        "expert_shared_count": 1,
        "expert_weights_norm": False,
        "expert_weights_scale": 1.0,
        "expert_group_count": 1,
        "moe_latent_size": 24,
        "expert_gating_func": 2,
    }
    path = write_gguf(model, tmp_path / "m.gguf", arch="nemotron_h_moe", extra=extra)
    assert_same(load_checkpoint(path), load_checkpoint(model))
    assert CliRunner().invoke(main, ["inspect", str(path)]).exit_code == 0


def test_falcon_h1_with_a_norm(tmp_path: Path) -> None:
    model = write_random(tmp_path / "model", "falcon_h1_norm", mamba_norm_before_gate=False)
    path = write_gguf(model, tmp_path / "m.gguf", arch="falcon-h1")
    assert_same(load_checkpoint(path), load_checkpoint(model))


@pytest.mark.full
def test_falcon_h1_with_its_multipliers_in_the_weights(tmp_path: Path) -> None:
    """They are rounded there, so that logits differ in the last bits, and tokens are the same."""
    model = GOLDEN / "families" / "falcon_h1"
    path = write_gguf(model, tmp_path / "m.gguf", arch="falcon-h1")
    prompts = [[*range(3, 40)], [7, 8, 9]]
    found = []
    for each in (path, model):
        with LLM(each, dtype="float32", max_num_seqs=2, max_model_len=256) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
            found.append([out.outputs[0] for out in llm.generate(prompts, greedy, use_tqdm=False)])
    for stored, source in zip(*found, strict=True):
        assert stored.token_ids == source.token_ids
        assert stored.cumulative_logprob == pytest.approx(source.cumulative_logprob, rel=1e-4)


def test_moonlight(tmp_path: Path) -> None:
    """DeepSeek V3 without groups of experts."""
    fields = {"rope_interleave": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    model = write_random(tmp_path / "model", "deepseek_v3", **fields)
    path = write_gguf(model, tmp_path / "m.gguf", arch="deepseek2", extra=MOONLIGHT)
    assert_same(load_checkpoint(path), load_checkpoint(model))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"expert_group_count": 8}, "does not divide the 6 experts"),
        ({"expert_gating_func": 3}, "expert_gating_func = 3"),
    ],
)
def test_other_ways_to_choose_experts_are_refused(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    model = GOLDEN / "families" / "deepseek_v2"
    path = write_gguf(model, tmp_path / "m.gguf", arch="deepseek2", extra=DEEPSEEK2 | change)
    assert_refused(path, word)


def test_groups_that_a_file_does_not_tell_are_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of DeepSeek V2 and V3 are known, by the number of their experts."""
    path = write_gguf(
        GOLDEN / "families" / "deepseek_v2", tmp_path / "m.gguf", arch="deepseek2", extra=DEEPSEEK2
    )
    monkeypatch.setattr(architectures, "_UNGROUPED", 5)
    assert_refused(path, "6 experts without their groups")
    monkeypatch.setattr(architectures, "_GROUPS", {6: (3, 2)})
    experts = load_checkpoint(path).config.experts
    assert experts is not None and (experts.n_group, experts.topk_group) == (3, 2)


def test_what_is_dealt_out_by_rows_stays_packed(tmp_path: Path) -> None:
    """Only the last product of a DeltaNet layer, whose columns the file has in another order, does not."""
    model = write_random(tmp_path / "model", "qwen3_5", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", arch="qwen35", kind=_kind)
    stored = load_checkpoint(path).weights.stored  # type: ignore[attr-defined]
    assert stored["layers.0.delta.projected"] == (("Q8_0", 256), ("Q8_0", 192), ("Q8_0", 6), ("Q8_0", 6))
    assert "layers.0.delta.output" not in stored and "layers.2.qkv" in stored


def test_gemma4s_experts_stay_packed(tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    model = write_random(tmp_path / "model", "gemma4_moe", **fields)
    extra = {**GEMMA4_MOE, "feed_forward_length": 64}
    path = write_gguf(
        model,
        tmp_path / "m.gguf",
        arch="gemma4",
        kind=lambda name: Kind.Q8_0 if "_exps" in name else Kind.F32,
        extra=extra,
    )
    stored = load_checkpoint(path).weights.stored  # type: ignore[attr-defined]
    assert stored["layers.0.experts.routed_gate_up"] == (("Q8_0", 64),) * 6
    assert stored["layers.0.experts.routed_down"] == (("Q8_0", 64),) * 6


def _kind(name: str) -> Kind:
    return Kind.F32 if "ssm_conv1d" in name else Kind.Q8_0


@pytest.mark.parametrize(("name", "arch"), [("qwen3_5", "qwen35"), ("qwen3_5_moe", "qwen35moe")])
def test_the_layer_of_multi_token_prediction_follows_the_model(name: str, arch: str, tmp_path: Path) -> None:
    model = write_random(tmp_path / "model", name, **THIRD)
    tensors, size = load_file(model / "model.safetensors"), 36 if "moe" in name else 40
    draw = np.random.default_rng(0)
    tensors |= {
        tensor.replace("model.layers.2.", "mtp.layers.0."): leaf + 1
        for tensor, leaf in tensors.items()
        if tensor.startswith("model.layers.2.")
    }
    shapes = {"norm": (size,), "pre_fc_norm_embedding": (size,), "pre_fc_norm_hidden": (size,)}
    for tensor, shape in {**shapes, "fc": (size, 2 * size)}.items():
        tensors[f"mtp.{tensor}.weight"] = draw.standard_normal(shape).astype(np.float32)
    save_file(tensors, model / "model.safetensors")
    path = write_gguf(model, tmp_path / "m.gguf", arch=arch, extra={"nextn_predict_layers": 1})
    stored, source = load_checkpoint(path), load_checkpoint(model)
    assert_same(stored, source)
    assert_same(load_mtp(stored), load_mtp(source))


def test_decays_are_what_they_were_in_the_model() -> None:
    """A logarithm of an exponential loses the last bits, unless one knows how short the numbers were."""
    draw = np.random.default_rng(0).uniform(-12, 4, 4096).astype(np.float32)
    short = draw.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(log_decay(-np.exp(short)), short)
    np.testing.assert_allclose(np.exp(log_decay(-np.exp(draw))), np.exp(draw), rtol=2.0**-20)
