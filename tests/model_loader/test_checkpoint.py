"""Loading model directories: right leaves from right files, one CheckpointError for everything else."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import xla_engine.model_loader.tensor_files as tensor_files
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import ModelConfig, RopeScaling
from xla_engine.graphs.model.decoder import parameter_shapes
from xla_engine.model_loader.checkpoint import load_checkpoint, random_weights, read_config
from xla_engine.model_loader.families import LLAMA, tensor_sources

GOLDEN = Path(__file__).parents[1] / "golden"
BF16 = np.dtype(ml_dtypes.bfloat16)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3_SCALING = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

Tensors = dict[str, np.ndarray]
MakeModel = Callable[..., Path]


def tensors_of(config: Mapping[str, Any], dtype: Any = np.float32) -> Tensors:
    """Checkpoint tensors that fit `config`, every element distinct from its neighbours."""
    h, d, f, v = (
        config[k] for k in ("num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    )
    kv, head = config["num_key_value_heads"], config.get("head_dim") or d // h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (d,),
                "self_attn.q_proj": (h * head, d),
                "self_attn.k_proj": (kv * head, d),
                "self_attn.v_proj": (kv * head, d),
                "self_attn.o_proj": (d, h * head),
                "post_attention_layernorm": (d,),
                "mlp.gate_proj": (f, d),
                "mlp.up_proj": (f, d),
                "mlp.down_proj": (d, f),
            }.items()
        }
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write a model directory: CONFIG with `config` changed, weights that fit or `tensors`, in `shards`."""

    def make(
        name: str = "model",
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Tensors | None = None,
        dtype: Any = np.float32,
        shards: int = 0,
        generation: Mapping[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        fields = CONFIG | dict(config or {})
        (directory / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        tensors = tensors_of(fields, dtype) if tensors is None else tensors
        if shards:
            write_shards(directory, tensors, shards)
        else:
            save_file(tensors, directory / "model.safetensors")
        return directory

    return make


def write_shards(directory: Path, tensors: Tensors, count: int) -> None:
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::count]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def edit_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def assert_refused(directory: Path, *words: str, dtype: str = "auto") -> None:
    """One CheckpointError that names the directory, every word, and a remedy after a full stop."""
    with pytest.raises(CheckpointError) as caught:
        dict(load_checkpoint(directory, dtype=dtype).weights)
    message = str(caught.value)
    for word in (str(directory), *words):
        assert word in message
    assert any(part[:1].isupper() for part in message.split(". ")[1:]), f"no remedy in: {message}"


# Loading


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


def read_config_of(fields: Mapping[str, Any]) -> ModelConfig:
    names = ModelConfig.__dataclass_fields__
    known = {name: value for name, value in fields.items() if name in names}
    return ModelConfig(**known, head_dim=fields["hidden_size"] // fields["num_attention_heads"])


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


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        (None, [2, 7], (2, 7)),
        (None, None, ()),
        ({}, 2, (2,)),
        ({"eos_token_id": None}, 2, (2,)),
        ({"eos_token_id": []}, 2, (2,)),
        ({"eos_token_id": 7}, 2, (7,)),
        ({"eos_token_id": [9, 7, 9, 0]}, 2, (9, 7, 0)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    make_model: MakeModel, generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]
) -> None:
    checkpoint = load_checkpoint(make_model(config={"eos_token_id": config}, generation=generation))
    assert checkpoint.eos_token_ids == expected
    assert checkpoint.bos_token_id == 1


@pytest.mark.parametrize("value", [11, -1, 2.0, "2", True, [2, 11], [[2]], {"id": 2}, 10**30])
def test_special_ids_outside_the_vocabulary_are_refused(make_model: MakeModel, value: Any) -> None:
    assert_refused(make_model("a", config={"eos_token_id": value}), "config.json", "eos_token_id", "10")
    assert_refused(make_model("b", config={"bos_token_id": value}), "config.json", "bos_token_id")
    directory = make_model("c", generation={"eos_token_id": value})
    assert_refused(directory, "generation_config.json", "eos_token_id")


def test_bos_may_be_absent_but_not_several(make_model: MakeModel) -> None:
    assert load_checkpoint(make_model("none", config={"bos_token_id": None})).bos_token_id is None
    assert_refused(make_model("two", config={"bos_token_id": [1, 2]}), "bos_token_id")


# Configuration


def test_fields_that_real_files_leave_out_take_their_defaults(make_model: MakeModel) -> None:
    directory = make_model()
    fields = {
        key: value
        for key, value in CONFIG.items()
        if not key.startswith(("rms", "max_pos", "tie", "num_key"))
    }
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_config(directory)
    assert config == ModelConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )


def test_a_config_is_read_without_weights(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    assert read_config(str(directory)).vocab_size == 11


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, None),
        ({"rope_parameters": {}}, 10000.0, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0, "factor": None}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3_SCALING),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3_SCALING),
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3_SCALING),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, 10000.0, LLAMA3_SCALING),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"type": "llama3"}},
            1e4,
            LLAMA3_SCALING,
        ),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 32}, 1e4, LLAMA3_SCALING),
    ],
)
def test_rope_fields_of_old_and_new_files(
    make_model: MakeModel, fields: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = read_config(make_model(config=fields))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, ["rope_scaling.type", "mrope", "llama3"]),
        ({"rope_scaling": {"rope_type": "dynamic", "beta_fast": 2.0}}, ["beta_fast", "dynamic"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["original_max", "missing"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["original_max", "missing"]),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, ["rope_parameters.rope_type"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_parameters": {"factor": 2.0}}, ["factor", "default"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": "llama3"}, ["rope_parameters"]),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            ["rope_scaling", "contradicts"],
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta", "500000"]),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, ["original_max", "contradicts"]),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, ["low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, ["factor", "null"]),
        ({"rope_scaling": LLAMA3 | {"factor": math.inf}}, ["factor"]),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32.0}}, ["original_max"]),
        ({"rope_theta": -1.0}, ["rope_theta"]),
        ({"rope_theta": math.nan}, ["rope_theta"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_theta": "10000"}, ["rope_theta"]),
        ({"rope_theta": True}, ["rope_theta"]),
    ],
)
def test_other_rope_fields_are_refused_by_name(
    make_model: MakeModel, fields: dict[str, Any], words: list[str]
) -> None:
    assert_refused(make_model(config=fields, tensors={}), "config.json", *words)


@pytest.mark.parametrize(
    "fields",
    [
        {"pretraining_tp": 2},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"sliding_window": 4096},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": "full_attention"},
        {"rope_interleaved": True},
        {"no_rope_layers": [1, 0]},
        {"final_logit_softcapping": 30.0},
        {"embedding_multiplier": 12.0},
    ],
)
def test_features_that_are_not_built_in_are_refused_by_name(
    make_model: MakeModel, fields: dict[str, Any]
) -> None:
    assert_refused(make_model(config=fields), "config.json", *fields, "supported", "Llama")


def test_values_that_mean_plain_llama_are_accepted(make_model: MakeModel) -> None:
    plain = {
        "attention_bias": False,
        "mlp_bias": None,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "quantization_config": None,
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention"],
        "partial_rotary_factor": 1.0,
        "rope_interleaved": False,
        "torch_dtype": "bfloat16",
        "is_llama_config": True,
    }
    assert load_checkpoint(make_model("plain", config=plain)).config == read_config(make_model("bare"))


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["FalconForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "Other"]},
        {"architectures": []},
        {"architectures": None},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [{}]},
        {"model_type": "mistral"},
        {"model_type": ["llama"]},
    ],
)
def test_other_architectures_are_refused_by_name(make_model: MakeModel, fields: dict[str, Any]) -> None:
    shown = json.dumps(next(iter(fields.values())))
    assert_refused(make_model(config=fields), "config.json", *fields, shown, "LlamaForCausalLM")


def test_remote_code_is_never_run(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    other = make_model("other", config=remote | {"architectures": ["EvilForCausalLM"]})
    llama = make_model("llama", config=remote)
    for directory in (other, llama):
        (directory / "modeling_evil.py").write_text("raise SystemExit('remote code ran')")
        monkeypatch.syspath_prepend(str(directory))
    assert_refused(other, "EvilForCausalLM", "auto_map", "never run")
    assert load_checkpoint(llama).config.vocab_size == 11


SIZES = [name for name in CONFIG if name.startswith(("vocab", "hidden", "inter", "num", "max"))] + [
    "head_dim"
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, -(10**12), 10**12, 10**400, 8.0, "8", True, [8], {}, math.nan])
def test_absurd_sizes_are_refused(make_model: MakeModel, name: str, value: Any) -> None:
    assert_refused(make_model(config={name: value}, tensors={}), "config.json", name)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_required_sizes_are_named_when_missing(make_model: MakeModel, name: str) -> None:
    assert_refused(make_model(config={name: None}, tensors={}), name, "null")
    directory = make_model("absent")
    (directory / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != name}))
    assert_refused(directory, name, "missing")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 3}, ["hidden_size", "num_attention_heads", "head_dim"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "multiple"]),
        ({"head_dim": 5}, ["head_dim", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
    ],
)
def test_impossible_configurations_are_refused(
    make_model: MakeModel, fields: dict[str, Any], words: list[str]
) -> None:
    assert_refused(make_model(config=fields, tensors={}), "config.json", *words)


def test_sizes_that_the_files_do_not_hold_are_never_allocated(make_model: MakeModel) -> None:
    directory = make_model(
        config={"vocab_size": 2**24, "hidden_size": 2**20, "head_dim": 2}, tensors=tensors_of(CONFIG)
    )
    tracemalloc.start()
    try:
        assert_refused(directory, "model.embed_tokens.weight", "[11, 8]", "[16777216, 1048576]")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_too_little_memory_is_said_with_the_size(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    directory = make_model()
    monkeypatch.setattr(np, "empty", refuse)
    assert_refused(directory, "no memory for embed", "GB that the model needs as float32")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"vocab_size": 11, "vocab_size": 12}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused(make_model: MakeModel, name: str, content: bytes) -> None:
    directory = make_model(shards=2)
    (directory / name).write_bytes(content)
    assert_refused(directory, name)


def test_oversized_json_is_refused_unread(make_model: MakeModel) -> None:
    directory = make_model()
    with (directory / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert_refused(directory, "config.json", "MiB")


def test_paths_that_are_no_model_directory(make_model: MakeModel, tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "no such directory")
    directory = make_model()
    assert_refused(directory / "config.json", "not a directory")
    (directory / "config.json").unlink()
    assert_refused(directory, "config.json", "no such file")
    (directory / "config.json").mkdir()
    assert_refused(directory, "config.json")
    for path in ("a\0b", "x" * 5000, "~no-such-user-here/model"):
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


# Weights


def test_a_missing_tensor_is_named(make_model: MakeModel) -> None:
    for number, name in enumerate(["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]):
        tensors = tensors_of(CONFIG)
        del tensors[name]
        assert_refused(make_model(f"{number}", tensors=tensors), "model.safetensors", name, "missing")
    assert_refused(make_model("none", tensors={}), "model.embed_tokens.weight", "missing")


def test_an_unexpected_tensor_is_named(make_model: MakeModel) -> None:
    for number, name in enumerate(
        ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
    ):
        tensors = tensors_of(CONFIG) | {name: np.zeros((6, 8), np.float32)}
        assert_refused(make_model(f"{number}", tensors=tensors), "model.safetensors", name, "not part")


@pytest.mark.parametrize("shape", [(6, 8, 1), (48,), (8, 6), (5, 8), (0, 8)])
def test_a_wrong_shape_is_named(make_model: MakeModel, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(CONFIG) | {name: np.zeros(shape, np.float32)}
    assert_refused(make_model(tensors=tensors), "model.safetensors", name, str(list(shape)), "[6, 8]")


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (np.int8, "I8"),
        (np.int32, "I32"),
        (np.float64, "F64"),
        (bool, "BOOL"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_a_wrong_dtype_is_named(make_model: MakeModel, dtype: Any, word: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    directory = make_model()
    raw = {n: (t.dtype.name, t) for n, t in tensors_of(CONFIG).items()}
    raw[name] = (word, np.zeros((6, 8), dtype))
    words = {"float32": "F32"}
    write_raw(directory / "model.safetensors", {n: (words.get(d, d), t) for n, (d, t) in raw.items()})
    assert_refused(directory, "model.safetensors", name, word)


def write_raw(file: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (word, array) in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {"dtype": word, "shape": list(array.shape), "data_offsets": [start, len(data)]}
    write_file(file, json.dumps(header).encode(), data)


def write_file(file: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[" * 100_000, b""),
        (b"\xff\xff", b""),
        ({"x": entry([2], [0, 8])}, b"1234"),  # truncated
        ({"x": entry([2], [0, 8])}, b"12345678tail"),
        ({"x": entry([3], [0, 8])}, b"12345678"),
        ({"x": entry([2], [0, 8]), "y": entry([2], [4, 12])}, b"123456789012"),  # overlapping
        ({"x": entry([2], [0, 8]), "y": entry([2], [0, 8])}, b"12345678"),
        ({"x": entry([2], [0, 8]), "y": entry([2], [12, 20])}, b"1" * 20),  # a hole
        ({"x": entry([2], [8, 0])}, b"12345678"),
        ({"x": entry([-2], [0, 8])}, b"12345678"),
        ({"x": entry([2], [-8, 0])}, b"12345678"),
        ({"x": entry([2**62, 4], [0, 8])}, b"12345678"),  # overflows
        ({"x": entry([2**40], [0, 2**42])}, b"12345678"),
        ({"x": entry([2], [0, 8], "Q9")}, b"12345678"),
        ({"x": {"dtype": "F32"}}, b""),
        ({"x": 3}, b""),
        (b'{"x": %s, "x": %s}' % ((json.dumps(entry([1], [0, 4])).encode(),) * 2), b"1234"),  # repeated
    ],
)
def test_malicious_headers_are_refused(make_model: MakeModel, header: Any, data: bytes) -> None:
    directory = make_model()
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_file(directory / "model.safetensors", content, data)
    assert_refused(directory, "model.safetensors")


@pytest.mark.parametrize("length", [0, 10**6, 2**40, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file_are_refused_without_allocation(
    make_model: MakeModel, length: int
) -> None:
    directory = make_model()
    write_file(directory / "model.safetensors", b"{}", length=length)
    tracemalloc.start()
    try:
        assert_refused(directory, "model.safetensors", "header")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_truncated_files_are_refused_at_every_length(make_model: MakeModel) -> None:
    directory = make_model()
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for length in [*range(64), *range(64, len(content), 211), len(content) - 1]:
        file.write_bytes(content[:length])
        assert_refused(directory, "model.safetensors")


def test_weights_that_are_no_regular_file(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")  # reading it would wait for ever
    assert_refused(directory, "model.safetensors", "regular")


def test_duplicate_tensors_over_shards_are_named(make_model: MakeModel) -> None:
    directory = make_model(shards=2)
    file = directory / "model-00002-of-00002.safetensors"
    name = "model.embed_tokens.weight"
    save_file(tensors_of(CONFIG), file)
    assert_refused(
        directory, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "also in"
    )
    edit_index(directory, lambda weight_map: weight_map.update(dict.fromkeys(weight_map, file.name)))
    assert load_checkpoint(directory).weights["embed"].shape == tensors_of(CONFIG)[name].shape


@pytest.mark.parametrize(
    "shard",
    [
        "../other/model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..safetensors",
        ".safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        "pytorch_model.bin",
        "",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_point_outside_the_directory(make_model: MakeModel, shard: Any) -> None:
    make_model("other")
    directory = make_model(shards=2)
    edit_index(directory, lambda weight_map: weight_map.update({"lm_head.weight": shard}))
    assert_refused(directory, "model.safetensors.index.json", "lm_head.weight", repr(shard))


def test_an_index_that_disagrees_with_the_shards_is_refused(make_model: MakeModel) -> None:
    absent = make_model("absent", shards=2)
    (absent / "model-00002-of-00002.safetensors").unlink()
    assert_refused(absent, "model-00002-of-00002.safetensors", "no such file")

    swapped = make_model("swapped", shards=2)
    other = "model-00001-of-00002.safetensors"
    moved = json.loads((swapped / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, shard in moved.items() if shard != other)
    edit_index(swapped, lambda weight_map: weight_map.update({name: other}))
    assert_refused(swapped, "model.safetensors.index.json", name, other)

    unlisted = make_model("unlisted", shards=2)
    edit_index(unlisted, lambda weight_map: weight_map.pop("lm_head.weight"))
    assert_refused(unlisted, "lm_head.weight", "model.safetensors.index.json")

    for number, index in enumerate([{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}]):
        directory = make_model(f"{number}", shards=2)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_refused(directory, "model.safetensors.index.json", "weight_map")


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt", "last.ckpt"],
)
def test_pickled_weights_are_named_and_never_opened(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert_refused(directory, name, "pickle", "save_pretrained", "safetensors.torch.save_file")
    assert not (tmp_path / "exploded").exists()


def test_a_directory_without_weights_says_what_it_looked_for(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    assert_refused(directory, "model.safetensors", "index.json", "consolidated.safetensors")


# Fingerprints and random weights


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


# Fuzz: whatever the files say, a checkpoint or a CheckpointError

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 100)
    | st.floats()
    | st.sampled_from(["llama3", "default", "full_attention", "LlamaForCausalLM", "silu", ""])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*LLAMA3, "rope_theta", "x"]), inner)
    ),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    [
        *CONFIG,
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "hidden_act",
        "auto_map",
    ]
)


def loads_or_refuses(directory: Path) -> None:
    try:
        checkpoint = load_checkpoint(directory)
    except CheckpointError:
        return
    assert {name: array.shape for name, array in checkpoint.weights.items()}


@FUZZ
@given(fields=st.dictionaries(FIELD_NAMES, JSON_VALUES, min_size=1, max_size=3), generation=st.booleans())
def test_fuzzed_config_fields(fields: dict[str, Any], generation: bool, tmp_path: Path) -> None:
    save_file(tensors_of(CONFIG), tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        changed = fields if generation == name.startswith("gen") else {}
        (tmp_path / name).write_text(json.dumps(CONFIG | changed))
    loads_or_refuses(tmp_path)


@st.composite
def mutations(draw: st.DrawFn, length: int) -> Callable[[bytes], bytes]:
    """Overwrite, insert or delete a few bytes somewhere in the first `length`."""
    edits = draw(
        st.lists(
            st.tuples(st.integers(0, length - 1), st.integers(0, 4), st.binary(max_size=4)),
            min_size=1,
            max_size=3,
        )
    )

    def apply(content: bytes) -> bytes:
        for start, deleted, inserted in edits:
            content = content[:start] + inserted + content[start + deleted :]
        return content

    return apply


@FUZZ
@given(mutate=mutations(300), length=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 4000))
def test_fuzzed_header_bytes(mutate: Callable[[bytes], bytes], length: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(CONFIG), file)
    content = file.read_bytes()
    (header_length,) = struct.unpack("<Q", content[:8])
    header = mutate(content[8 : 8 + header_length])
    write_file(file, header, content[8 + header_length :], length)
    loads_or_refuses(tmp_path)


@FUZZ
@given(
    name=st.sampled_from(sorted(tensors_of(CONFIG))),
    change=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(
                ["F32", "F16", "BF16", "I32", "F8_E4M3", "F4", "BOOL", "C64", "U8", 3, None]
            ),
            "shape": st.lists(st.integers(-1, 20) | st.integers(), max_size=3),
            "data_offsets": st.lists(st.integers(0, 400) | st.integers(), max_size=3),
            "extra": JSON_VALUES,
        },
    ),
)
def test_fuzzed_header_fields(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(CONFIG), file)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[name] |= change
    write_file(file, json.dumps(header).encode(), content[8 + length :])
    loads_or_refuses(tmp_path)


@FUZZ
@given(mutate=mutations(400), name=st.sampled_from(["config.json", "model.safetensors.index.json"]))
def test_fuzzed_json_bytes(mutate: Callable[[bytes], bytes], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shards(tmp_path, tensors_of(CONFIG), 2)
    (tmp_path / name).write_bytes(mutate((tmp_path / name).read_bytes()))
    loads_or_refuses(tmp_path)
