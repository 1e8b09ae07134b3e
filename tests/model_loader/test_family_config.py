"""Families as data: config.json fields as published checkpoints have them, and the tensors that follow from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.architectures import KIMI, config
from tests.support.models import TINY
from tests.support.published_configs import FULL, LONG, PUBLISHED, SLIDES
from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import Rope, RopeScaling
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.ops.norms import apply_rope
from xla_engine.graphs.ops.rope import (
    cosines_and_sines,
    inverse_frequencies,
    power,
    rope_tables,
    rotary_order,
)
from xla_engine.model_loader.config_json import read_model, read_special_tokens
from xla_engine.model_loader.families import tensor_sources
from xla_engine.model_loader.model_files import open_model

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(write: Write, name: str) -> None:
    fields, expected = PUBLISHED[name]
    model, family = read_model(open_model(write(fields)))
    assert {key: getattr(model, key) for key in expected} == expected
    names = [source.name for stacked in tensor_sources(model, family).values() for source in stacked]
    assert len(set(names)) == len(names) and "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) == (not model.tie_word_embeddings)


def test_longrope_and_yarn_numbers_are_those_of_their_papers(write: Write) -> None:
    long = read_model(open_model(write(PUBLISHED["Phi-4-mini"][0])))[0].rope_scaling
    assert long is not None and long.long_factor == (2.0,) * 48
    assert long.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    yarn = read_model(open_model(write(PUBLISHED["Qwen2.5-7B"][0])))[0].rope_scaling
    assert yarn is not None and yarn.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("Qwen3-0.6B", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "Qwen3ForCausalLM"]),
        ("Qwen3-0.6B", {"layer_types": [FULL]}, ["layer_types"]),
        ("Qwen2.5-7B", {"use_mrope": True}, ["use_mrope"]),
        ("Mistral-7B-v0.1", {"sliding_window": 0}, ["sliding_window"]),
        ("Mistral-7B-v0.1", {"attention_bias": True}, ["attention_bias"]),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, ["no_rope_layers"]),
        ("gemma-2-2b", {"hidden_activation": "relu"}, ["hidden_activation"]),
        ("gemma-2-2b", {"layer_types": [SLIDES] * 26, "sliding_window": None}, ["sliding_window"]),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("Phi-4-mini", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor"]),
        ("Phi-4-mini", {"rope_scaling": LONG | {"short_factor": []}}, ["short_factor"]),
        ("Phi-4-mini", {"rope_scaling": LONG | {"long_factor": [1.0] * 7}}, ["long_factor", "48"]),
        ("Phi-4-mini", {"original_max_position_embeddings": 1}, ["original_max_position_embeddings"]),
        ("Llama-2-7B", {"num_hidden_layers": 4096}, ["num_hidden_layers"]),
        ("Llama-2-7B", {"rope_theta": 10**400}, ["rope_theta"]),
        ("c4ai-command-r-v01", {"use_qk_norm": True}, ["use_qk_norm"]),
        ("granite-3.1-2b", {"residual_multiplier": -1}, ["residual_multiplier"]),
    ],
)
def test_what_a_family_does_not_know_is_refused_by_name(
    write: Write, name: str, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(open_model(write(PUBLISHED[name][0] | fields)))
    assert all(word in str(caught.value) for word in words), caught.value


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def test_the_decoder_of_a_model_that_takes_pictures(write: Write) -> None:
    files = open_model(write(GEMMA3_4B))
    model, family = read_model(files)
    assert (model.num_attention_heads, model.head_dim, model.vocab_size) == (8, 256, 262208)
    assert model.rope_scaling is not None and model.rope_scaling.factor == 8
    assert model.layer_types[4:6] == (SLIDES, FULL) and model.max_position_embeddings == 131072
    (embed,) = tensor_sources(model, family)["embed"]
    assert embed.name == "language_model.model.embed_tokens.weight"
    assert read_special_tokens(files, model).eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_config": None}, ["text_config", "decoder"]),
        ({"text_config": {"model_type": "ministral3"}}, ["text_config.model_type", "ministral3"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config.quant_method", "hqq"]),
    ],
)
def test_a_decoder_that_is_not_described_is_refused(
    write: Write, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(open_model(write(GEMMA3_4B | fields)))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("name", "generation", "eos"),
    [
        ("Llama-2-7B", {"eos_token_id": [10, 20, 30]}, (10, 20, 30)),
        ("Qwen3-0.6B", {"eos_token_id": [151645, 151643], "pad_token_id": 151643}, (151645, 151643)),
        ("gemma-3-1b", {"eos_token_id": [1, 106], "bos_token_id": 2}, (1, 106)),
        ("Phi-4-mini", {"eos_token_id": [200020, 199999]}, (200020, 199999)),
        ("OLMo-2-7B", {"eos_token_id": 100257}, (100257,)),
    ],
)
def test_every_id_that_ends_a_text_is_known(
    write: Write, name: str, generation: dict[str, Any], eos: tuple[int, ...]
) -> None:
    files = open_model(write(PUBLISHED[name][0] | {"eos_token_id": 5}, generation))
    assert read_special_tokens(files, read_model(files)[0]).eos_token_ids == eos


# -- rotary embedding ----------------------------------------------------------------------------------------------


def changed(**fields: Any) -> ModelConfig:
    names = (name for name in ModelConfig.__slots__)
    return ModelConfig(**{**{name: getattr(TINY, name) for name in names}, **fields})


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_in_rotary_order_turn_as_the_checkpoint_means(interleaved: bool, part: float) -> None:
    """Rotated and reordered heads give the scores that the checkpoint's own pairs give in its own order."""
    model = changed(rope_interleaved=interleaved, partial_rotary_factor=part)
    order, turned = rotary_order(model), model.rotary_dim
    assert sorted(order) == list(range(model.head_dim))
    q, k = np.random.default_rng(0).standard_normal((2, 40, 1, model.head_dim)).astype(np.float32)
    (table,) = rope_tables(model, 40)
    ours = [np.asarray(apply_rope(jnp.asarray(x[..., order]), jnp.asarray(table)))[:, 0] for x in (q, k)]
    angles = np.arange(40)[:, None] * inverse_frequencies(Rope(1e4, None, turned), 40)

    def theirs(x: np.ndarray) -> np.ndarray:
        if interleaved:
            pairs = x[..., 0:turned:2] + 1j * x[..., 1:turned:2]
        else:
            pairs = x[..., : turned // 2] + 1j * x[..., turned // 2 : turned]
        pairs = pairs[:, 0] * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag, x[:, 0, turned:]], axis=1)

    np.testing.assert_allclose(ours[0] @ ours[1].T, theirs(q) @ theirs(k).T, atol=1e-4)


def test_tables_are_one_per_distinct_rotation() -> None:
    layers = (SLIDES, FULL, SLIDES, FULL)
    local = changed(num_hidden_layers=4, layer_types=layers, sliding_window=8, rope_local_base_freq=100.0)
    assert [local.rope_index(index) for index in range(4)] == [0, 1, 0, 1]
    still = changed(num_hidden_layers=4, no_rope_layers=(1, 3))
    table = rope_tables(still, 20)
    assert table.shape == (2, 20, 2, TINY.head_dim // 2)
    assert (table[1, :, 0] == 1).all() and not table[1, :, 1].any()
    assert len(rope_tables(changed(), 20)) == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_look_at_the_longest_request_and_never_at_a_table(kind: str) -> None:
    scaling = RopeScaling(
        rope_type=kind,
        original_max_position_embeddings=64,
        factor=4.0,
        short_factor=(1.0,) * 8,
        long_factor=(3.0,) * 8,
    )
    model = changed(rope_scaling=scaling)
    whole = rope_tables(model, 128)
    np.testing.assert_array_equal(rope_tables(model, 32, context_length=128), whole[:, :32])
    assert not np.array_equal(rope_tables(model, 32), whole[:, :32])


def test_a_window_over_the_whole_context_is_none() -> None:
    model = changed(layer_types=(SLIDES, FULL), sliding_window=100)
    assert model.within(101).attention(0).window == 100
    assert model.within(100).attention(0).window is None
    assert model.attention(1).window is None


def test_flags_decide_which_parameters_a_layer_has() -> None:
    plain = {name.split(".", 2)[2] for name in parameter_shapes(TINY) if name.startswith("layers.0")}
    assert plain == {"input_norm", "qkv", "output", "pre_feedforward_norm", "gate_up", "down"}
    odd = changed(
        qkv_bias=True, qk_norm="all", attention_sinks=True, pre_norm=False, post_norm=True, mlp_bias=True
    )
    shapes = {name[9:]: shape for name, shape in parameter_shapes(odd).items() if name.startswith("layers.0")}
    assert shapes.keys() - plain == {
        *("qkv_bias", "q_norm", "k_norm", "sinks", "post_attention_norm", "post_feedforward_norm"),
        *("gate_up_bias", "down_bias"),
    }
    assert plain - shapes.keys() == {"input_norm", "pre_feedforward_norm"}
    assert shapes["q_norm"] == (96,) and shapes["k_norm"] == (48,) and shapes["sinks"] == (6,)


def test_tables_are_the_same_bits_whatever_of_the_processor_numpy_uses() -> None:
    """NumPy's `power`, `cos` and `sin` differ between instruction sets, and libm's between machines."""
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = RopeScaling(rope_type="llama3", original_max_position_embeddings=64, **llama)
    program = f"""if True:
        import hashlib
        from xla_engine.graphs.config import *
        from xla_engine.graphs.ops.rope import rope_tables
        for model in {[changed(rope_theta=1e6), changed(rope_theta=5e5, rope_scaling=scaling)]!r}:
            print(hashlib.sha256(rope_tables(model, 3000)).hexdigest())
    """
    numpy = np._core._multiarray_umath
    present = [name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name]]
    found = set()
    for disabled in ("", " ".join(present)):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert len(done.stdout.split()) == 2, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_angles_are_turned_to_the_nearest_number() -> None:
    angles = np.arange(0, 1 << 20, 37, dtype=np.float32)[:, None] * np.geomspace(1, 1e-6, 5).astype(
        np.float32
    )
    exact = angles.astype(np.float64)
    wanted = np.stack([np.cos(exact), np.sin(exact)], axis=1)
    found = cosines_and_sines(angles)
    assert np.abs(found - wanted).max() < 2.0**-24
    assert (found != wanted.astype(np.float32)).sum() <= 1
    assert [power(10000.0, each) for each in (0.0, 0.5, 1.0)] == [1.0, 100.0, 10000.0]


@pytest.mark.parametrize(
    ("fields", "rotates"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, True),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
        ({"rope_parameters": None, "rope_theta": 5e5}, True),
    ],
)
def test_olmo_hybrid_rotates_unless_the_base_is_null(
    fields: dict[str, Any], rotates: bool, write: Write
) -> None:
    sizes = config("OlmoHybridForCausalLM", "olmo_hybrid", 128, 96, 4, 2, 2, 99, 256)
    found = read_model(open_model(write(sizes | fields)))[0]
    assert [found.rope(index) is not None for index in range(4)] == [rotates] * 4
    assert [(found.layer(index).pre_norm, found.layer(index).post_norm) for index in (2, 3)] == [
        (True, False),
        (False, True),
    ]
    assert found.delta is not None and (found.delta.key_dim, found.delta.value_dim) == (48, 96)


def test_kimi_linear_is_read_by_its_own_names_and_by_those_of_transformers(write: Write) -> None:
    own = read_model(open_model(write(KIMI)))[0]
    linear = KIMI["linear_attn_config"]
    attends = [each in linear["full_attn_layers"] for each in range(1, 28)]
    names = {"num_experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}
    others = {names.get(name, name): value for name, value in KIMI.items() if name != "linear_attn_config"}
    others |= {"layer_types": ["full_attention" if each else "linear_attention" for each in attends]}
    others |= {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    assert read_model(open_model(write(others)))[0] == own
    assert own.max_position_embeddings == 1048576 and own.head_dim == 512 + 64 and own.mlp_only_layers == (0,)
    assert own.experts is not None and own.experts.num_experts == 256 and own.experts.norm_topk_prob
    assert own.delta is not None and own.delta.fused_rows == 3 * 4096 + 128 + 32 + 128
    assert own.ropes == (None,) and [own.attends(index) for index in range(27)] == attends


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"mla_use_nope": False}, "rotary embedding"),
        ({"moe_router_activation_func": "softmax"}, "not chosen by sigmoids"),
        ({"moe_layer_freq": 2}, "between others"),
        ({"linear_attn_config": {"full_attn_layers": 4}}, "list of layer numbers"),
    ],
)
def test_other_forms_of_kimi_linear_are_refused(fields: dict[str, Any], word: str, write: Write) -> None:
    with pytest.raises(CheckpointError, match=word):
        read_model(open_model(write(KIMI | fields)))
