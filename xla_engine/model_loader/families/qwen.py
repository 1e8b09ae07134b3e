"""Qwen2 and 2.5 (biases on q, k and v) and Qwen3 (normed query and key heads)."""

from typing import Any

from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import HEAD_NORMS, TENSORS
from xla_engine.model_loader.families.windows import sliding
from xla_engine.model_loader.json_fields import Fields

_READS = ("use_sliding_window", "sliding_window", "layer_types")


def windows(fields: Fields) -> dict[str, Any]:
    """Sliding windows are off unless `use_sliding_window`; then layers from `max_window_layers` on have them."""
    if not fields.flag("use_sliding_window", default=False):
        fields = Fields(fields.file, {**fields.values, "sliding_window": None})
    first = fields.integer("max_window_layers", low=0, high=2**31 - 1, default=28)
    return sliding(fields, lambda index: index >= first)


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {"qkv_bias": True, **windows(fields)}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", default=False)
    return {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias, **windows(fields)}


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    tensors=TENSORS,
    reads=_READS,
    flags=_qwen2,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    tensors=TENSORS | HEAD_NORMS,
    reads=(*_READS, "attention_bias"),
    flags=_qwen3,
    defaults={**QWEN2.defaults, "head_dim": 128},
)
