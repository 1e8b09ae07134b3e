"""Fields of config.json: their meaning, and which values are refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.checkpoints import CONFIG, LLAMA3, MakeModel, assert_refused
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RopeScaling
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.config_json import read_config

LLAMA3_SCALING = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
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
