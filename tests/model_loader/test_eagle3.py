"""EAGLE-3 heads on disk: reading them, the layers they use, and which ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.eagle3 import head_config, head_tensors, write_head
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.model_loader.eagle3 import load_eagle3
from xla_engine.runner.drafting.proposers import device_proposer_of

SEVEN = replace(TINY, num_hidden_layers=7)
SEEN = 3 * TINY.hidden_size
MODEL = tiny_checkpoint(model=SEVEN)
Tensors = dict[str, np.ndarray]


def speculators(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same head as vllm-project/speculators describes it."""
    head = ("draft_vocab_size", "architectures")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": {name: each for name, each in config.items() if name not in head},
        **fields,
    }


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_every_tensor_has_its_place(layer: str, tmp_path: Path) -> None:
    config = head_config(SEVEN, 100)
    tensors = head_tensors(config, SEEN, layer)
    head = load_eagle3(write_head(tmp_path, config, tensors), MODEL)
    assert head.ids is not None and "embed" not in head.weights
    assert np.array_equal(head.ids, np.arange(100) + tensors["d2t"])
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), head.ids)
    for leaf, names in {
        "fuse": ["fc"],
        "token_norm": [f"{layer}input_layernorm"],
        "hidden_norm": [f"{layer}hidden_norm"],
        "qkv": [f"{layer}self_attn.{part}_proj" for part in "qkv"],
        "output": [f"{layer}self_attn.o_proj"],
        "mlp_norm": [f"{layer}post_attention_layernorm"],
        "gate_up": [f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"],
        "down": [f"{layer}mlp.down_proj"],
        "final_norm": ["norm"],
        "head": ["lm_head"],
    }.items():
        stored = np.concatenate([tensors[f"{name}.weight"] for name in names])
        assert np.array_equal(head.weights[leaf], stored.astype(head.weights[leaf].dtype)), leaf
    assert head.weights.nbytes == sum(leaf.nbytes for leaf in head.weights.values())
    assert (head.taps, head.norm_before_residual) == ((2, 3, 4), False)


def test_heads_of_all_ids_and_of_their_own_embedding(tmp_path: Path) -> None:
    """Neither `d2t` nor `draft_vocab_size`; an embedding that is the model's own is not kept twice."""
    config = head_config(SEVEN, SEVEN.vocab_size)
    tensors = head_tensors(config, SEEN)
    del config["draft_vocab_size"]
    assert load_eagle3(write_head(tmp_path, config, tensors), MODEL).ids is None
    tensors["d2t"] = np.zeros(SEVEN.vocab_size, np.int64)
    for embed in (MODEL.weights["embed"], MODEL.weights["embed"] * 2):
        head = load_eagle3(write_head(tmp_path, config, {**tensors, "embed_tokens.weight": embed}), MODEL)
        assert head.ids is None
        assert ("embed" in head.weights) == (embed is not MODEL.weights["embed"])


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5]}, (0, 5)),
    ],
)
def test_layers_are_counted_as_vllm_and_sglang_do(
    fields: dict[str, Any], taps: tuple[int, ...], tmp_path: Path
) -> None:
    config = head_config(SEVEN, 100, **fields)
    tensors = head_tensors(config, len(taps) * SEVEN.hidden_size)
    assert load_eagle3(write_head(tmp_path, config, tensors), MODEL).taps == taps


def test_the_form_of_speculators(tmp_path: Path) -> None:
    plain = head_config(SEVEN, 100)
    tensors = head_tensors(plain, SEEN, "layers.0.")
    expected = load_eagle3(write_head(tmp_path, plain, tensors), MODEL)
    for fields, normed in (({}, True), ({"norm_before_residual": False}, False)):
        head = load_eagle3(write_head(tmp_path, speculators(plain, **fields), tensors), MODEL)
        assert (head.config, head.taps) == (expected.config, expected.taps)
        assert head.norm_before_residual is normed
    config = speculators(plain, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert load_eagle3(write_head(tmp_path, config, tensors), MODEL).taps == (1, 2, 3)


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, tensor: np.ndarray) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("fields", "change", "why"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, None, "architectures .* not an EAGLE-3 head. Use one"),
        ({"model_type": "qwen3"}, None, "model_type .* only heads whose layer is a Llama's"),
        ({"vocab_size": 300}, None, r"vocab_size = 300: the model has 199 token ids. Use a head"),
        ({"hidden_size": 64}, None, "hidden_size = 64: the model's hidden states have 48 features. Use"),
        ({"target_hidden_size": 64}, None, "target_hidden_size = 64: the model's hidden states have 48"),
        ({"num_hidden_layers": 2}, None, "num_hidden_layers = 2: only heads of one layer"),
        ({"attention_bias": True}, None, "attention_bias = true: not supported for EAGLE-3 heads. Use"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 8]}, None, "the model has 7 layers. Use a head"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, None, "must be a list of layers. Correct"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "only the last layer are not supported"),
        ({"draft_vocab_size": 90}, None, r"d2t is I64\[100\], not I64\[90\]. Correct"),
        ({}, without("fc.weight"), "tensor fc.weight is missing. Download"),
        ({}, without("lm_head.weight"), "lm_head.weight is missing. Use a head"),
        ({}, without("d2t"), "tensor d2t is missing, and the head knows 100 of 199 token ids. Download"),
        (
            {},
            with_tensor("fc.weight", np.zeros((48, 96), np.float32)),
            r"fc.weight has shape \[48, 96\], but",
        ),
        ({}, with_tensor("fc.bias", np.zeros(48, np.float32)), "'fc.bias' is not part of the model"),
        ({}, with_tensor("d2t", np.full(100, 150)), "does not give distinct token ids from 0 to 198. Use"),
    ],
)
def test_what_does_not_fit_is_refused(
    fields: dict[str, Any], change: Callable[[Tensors], None] | None, why: str, tmp_path: Path
) -> None:
    config = head_config(SEVEN, 100)
    tensors = head_tensors(config, SEEN)
    if change is not None:
        change(tensors)
    with pytest.raises(CheckpointError, match=why):
        load_eagle3(write_head(tmp_path, {**config, **fields}, tensors), MODEL)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output"])
def test_what_speculators_has_beside_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = head_config(SEVEN, 100)
    write_head(tmp_path, speculators(config, **{name: True}), head_tensors(config, SEEN, "layers.0."))
    with pytest.raises(CheckpointError, match=f"{name} = true: not supported"):
        load_eagle3(tmp_path, MODEL)


def test_models_that_no_head_fits(tmp_path: Path) -> None:
    config = head_config(TINY, 100)
    write_head(tmp_path, config, head_tensors(config, SEEN))
    with pytest.raises(CheckpointError, match="the model has 2 layers; heads read three of them"):
        load_eagle3(tmp_path, tiny_checkpoint())
    scaled = replace(MODEL, config=replace(SEVEN, embedding_multiplier=2.0))
    with pytest.raises(
        CheckpointError, match=r"cannot use the model's embedding.* its own embed_tokens.weight"
    ):
        load_eagle3(tmp_path, scaled)


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"eagle3" needs "model"'):
        EngineConfig(speculative_config={"method": "eagle3"})
    for method in ("eagle", "medusa"):
        with pytest.raises(ConfigError, match=f"'{method}' is not supported"):
            EngineConfig(speculative_config={"method": method, "model": "there"})
    options = {"method": "eagle3", "model": str(tmp_path)}
    found = EngineConfig(speculative_config=options).speculation
    assert found is not None and type(found).of(found.given()) == found
    several = replace(TINY_ENGINE, speculative_config=options, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="'eagle3' runs on one device; use tensor_parallel_size 1"):
        device_proposer_of(several, MODEL, None, None)
