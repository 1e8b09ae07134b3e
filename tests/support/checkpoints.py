"""Checkpoints of a small Llama on disk, right and wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import load_checkpoint

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


def read_config_of(fields: Mapping[str, Any]) -> ModelConfig:
    names = ModelConfig.__dataclass_fields__
    known = {name: value for name, value in fields.items() if name in names}
    return ModelConfig(**known, head_dim=fields["hidden_size"] // fields["num_attention_heads"])


def write_file(file: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
