"""Qwen2 and 2.5 (biases on q, k and v), Qwen3 (normed query and key heads), and Qwen3-VL, which reads pictures."""

from dataclasses import replace
from typing import Any

from xla_engine.model_loader.families.family import Family, with_bias
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


def patch_tower(tower: str, *, taps: bool) -> dict[str, tuple[str, ...]]:
    """The tensors of the tower of `graphs.vision.patches` by leaf. tower: prefix of their names."""
    layer, tap = tower + "blocks.{index}.", tower + "deepstack_merger_list.{index}."
    return {
        **with_bias("patch", f"{tower}patch_embed.proj"),
        "positions": (f"{tower}pos_embed.weight",),
        **with_bias("norm1", f"{layer}norm1"),
        **with_bias("qkv", f"{layer}attn.qkv"),
        **with_bias("output", f"{layer}attn.proj"),
        **with_bias("norm2", f"{layer}norm2"),
        **with_bias("up", f"{layer}mlp.linear_fc1"),
        **with_bias("down", f"{layer}mlp.linear_fc2"),
        **with_bias("merge_norm", f"{tower}merger.norm"),
        **with_bias("merge_up", f"{tower}merger.linear_fc1"),
        **with_bias("merge_down", f"{tower}merger.linear_fc2"),
        **(with_bias("tap_norm", f"{tap}norm") if taps else {}),
        **(with_bias("tap_up", f"{tap}linear_fc1") if taps else {}),
        **(with_bias("tap_down", f"{tap}linear_fc2") if taps else {}),
    }


QWEN3_VL = replace(
    QWEN3,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    text_type="qwen3_vl_text",
    tensors={
        **QWEN3.tensors,
        "embed": ("model.language_model.embed_tokens.weight",),
        "final_norm": ("model.language_model.norm.weight",),
    },
    layer="model.language_model.layers.{index}.",
    ignores=r"model\.visual\..*",
    defaults={**QWEN3.defaults, "max_position_embeddings": 128000},
    rope_theta=500000.0,
    vision=patch_tower("model.visual.", taps=True),
)
