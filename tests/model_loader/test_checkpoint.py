"""Loading model directories: right leaves from right files, one CheckpointError for everything else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import xla_engine.model_loader.tensor_files as tensor_files
from tests.support.checkpoints import BF16, CONFIG, MakeModel, assert_refused, read_config_of, tensors_of
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.model_loader.checkpoint import load_checkpoint, random_weights
from xla_engine.model_loader.config_json import read_config
from xla_engine.model_loader.families import LLAMA, tensor_sources

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_model_has_the_fingerprint_that_earlier_versions_gave_it() -> None:
    """Receipts, resumed runs and records name it, so a new field of a shape must not change it."""
    with (GOLDEN / "receipts" / "out.receipts.jsonl").open(encoding="utf-8") as lines:
        header = json.loads(lines.readline())
    found = load_checkpoint(embedded_model_directory()).fingerprint
    assert found == header["model"]["weights_sha256"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", [None, 6])
def test_leaves_have_the_names_and_shapes_the_graphs_expect(
    make_model: MakeModel, tied: bool, head_dim: int | None
) -> None:
    checkpoint = load_checkpoint(make_model(config={"tie_word_embeddings": tied, "head_dim": head_dim}))
    expected = parameter_shapes(checkpoint.config)
    assert {name: array.shape for name, array in checkpoint.weights.items()} == expected
    assert {name: a.shape for name, a in random_weights(checkpoint.config, dtype="bf16").items()} == expected


def test_fused_leaves_hold_their_parts_in_order(make_model: MakeModel) -> None:
    tensors = tensors_of(CONFIG)
    weights = load_checkpoint(make_model(tensors=tensors)).weights
    for i in range(2):
        layer = f"model.layers.{i}"
        q, k, v = (tensors[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        np.testing.assert_array_equal(weights[f"layers.{i}.qkv"], np.concatenate([q, k, v]))
        gate, up = (tensors[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        np.testing.assert_array_equal(weights[f"layers.{i}.gate_up"], np.concatenate([gate, up]))
    sources = tensor_sources(read_config_of(CONFIG), LLAMA).values()
    assert {source.name for stacked in sources for source in stacked} == tensors.keys()
    for leaf, name in {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "layers.1.output": "model.layers.1.self_attn.o_proj.weight",
        "layers.1.down": "model.layers.1.mlp.down_proj.weight",
        "layers.0.input_norm": "model.layers.0.input_layernorm.weight",
        "layers.0.pre_feedforward_norm": "model.layers.0.post_attention_layernorm.weight",
    }.items():
        np.testing.assert_array_equal(weights[leaf], tensors[name])


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "bf16", "float32", "f32"])
def test_matrices_take_the_asked_dtype_and_norms_stay_float32(
    make_model: MakeModel, stored: Any, asked: str
) -> None:
    tensors = tensors_of(CONFIG, stored)
    checkpoint = load_checkpoint(make_model(tensors=tensors), dtype=asked)
    name = {"f": "float32", "b": "bfloat16", "a": "float32" if stored is np.float32 else "bfloat16"}[asked[0]]
    assert checkpoint.dtype == name
    target = BF16 if name == "bfloat16" else np.dtype(np.float32)
    for leaf, array in checkpoint.weights.items():
        assert array.dtype == (np.float32 if leaf.endswith("norm") else target), leaf
    embed = tensors["model.embed_tokens.weight"].astype(np.float32).astype(target)
    np.testing.assert_array_equal(checkpoint.weights["embed"], embed)


def test_auto_is_float32_if_any_matrix_is_but_norms_do_not_count(make_model: MakeModel) -> None:
    tensors = tensors_of(CONFIG, BF16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    assert load_checkpoint(make_model("norm", tensors=tensors)).dtype == "bfloat16"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    assert load_checkpoint(make_model("matrix", tensors=tensors)).dtype == "float32"


def test_unknown_dtype_is_a_config_error(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"float16.*bfloat16"):
        load_checkpoint(make_model(), dtype="float16")


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_give_the_same_leaves(make_model: MakeModel, shards: int) -> None:
    whole = load_checkpoint(make_model("whole")).weights
    parts = load_checkpoint(make_model("parts", shards=shards)).weights
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


def test_the_single_file_wins_over_an_index(make_model: MakeModel) -> None:
    directory = make_model(shards=2)
    zeros = {name: np.zeros_like(array) for name, array in tensors_of(CONFIG).items()}
    save_file(zeros, directory / "model.safetensors")
    assert not load_checkpoint(directory).weights["embed"].any()


def test_symbolic_links_to_shards_are_followed(make_model: MakeModel, tmp_path: Path) -> None:
    """Hub caches keep files elsewhere and link to them."""
    directory = make_model(shards=2)
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        shutil.move(file, tmp_path / f"blob{number}")
        file.symlink_to(tmp_path / f"blob{number}")
    assert load_checkpoint(directory).weights.keys() == parameter_shapes(read_config(directory)).keys()


@pytest.mark.parametrize("name", ["gqa_tied", "untied_odd_heads", "llama3_rope"])
def test_checkpoints_saved_by_transformers_load(name: str) -> None:
    checkpoint = load_checkpoint(GOLDEN / name)
    assert checkpoint.dtype == "float32" and checkpoint.eos_token_ids == ()
    assert {leaf: a.shape for leaf, a in checkpoint.weights.items()} == parameter_shapes(checkpoint.config)
    assert (checkpoint.config.rope_scaling is not None) == (name == "llama3_rope")
    assert checkpoint.config.tie_word_embeddings == (name != "untied_odd_heads")


def test_old_rotary_buffers_are_ignored(make_model: MakeModel) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32),
        "model.rotary_emb.inv_freq": np.ones(1, np.float32),
    }
    directory = make_model(tensors=tensors_of(CONFIG) | extra)
    assert load_checkpoint(directory).weights.keys() == parameter_shapes(read_config(directory)).keys()


def test_a_tied_model_may_store_a_copy_of_the_embedding_as_head(make_model: MakeModel) -> None:
    config = {"tie_word_embeddings": True}
    tensors = tensors_of(CONFIG | config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert "head" not in load_checkpoint(make_model("copy", config=config, tensors=tensors)).weights
    tensors["lm_head.weight"][3, 3] += 1
    assert_refused(
        make_model("other", config=config, tensors=tensors), "lm_head.weight", "tie_word_embeddings"
    )
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float16)
    assert_refused(
        make_model("kind", config=config, tensors=tensors), "lm_head.weight", "tie_word_embeddings"
    )


@pytest.mark.parametrize("whole", [True, False])
def test_fingerprint_follows_content_not_place(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if not whole:  # hash blocks only, as for large files
        monkeypatch.setattr(tensor_files, "_HASH_WHOLE", 0)
        monkeypatch.setattr(tensor_files, "_HASH_BLOCK", 64)
    directory = make_model("one")
    first = load_checkpoint(directory).fingerprint
    assert len(first) == 64
    shutil.copytree(directory, tmp_path / "two")
    assert load_checkpoint(tmp_path / "two").fingerprint == first

    others = tensors_of(CONFIG)
    others["lm_head.weight"][-1, -1] += 1
    changed = [
        make_model("bits", tensors=others),
        make_model("eos", generation={"eos_token_id": [2, 3]}),
        make_model("eps", config={"rms_norm_eps": 1e-6}),
        make_model("kind", dtype=np.float16),
    ]
    prints = [load_checkpoint(model).fingerprint for model in changed]
    assert len({first, *prints}) == 1 + len(changed)


def test_random_weights_are_reproducible_leaf_by_leaf() -> None:
    config = replace(read_config_of(CONFIG), hidden_size=64, vocab_size=500, head_dim=16)
    one, two = random_weights(config, dtype="float32"), random_weights(config, dtype="f32", seed=1)
    deeper = random_weights(replace(config, num_hidden_layers=3), dtype="float32")
    low = random_weights(config, dtype="bfloat16")
    for name, array in one.items():
        assert array.dtype == np.float32 and not np.array_equal(array, two[name])
        np.testing.assert_array_equal(array, deeper[name])
        wanted = array if array.ndim == 1 else array.astype(BF16)
        np.testing.assert_array_equal(low[name], wanted)
    assert abs(one["embed"].std() - 0.02) < 0.001
    assert abs(one["final_norm"].mean() - 1) < 0.02
    assert not np.array_equal(one["layers.0.qkv"], one["layers.1.qkv"])
