"""Llama 2 to 3.2, TinyLlama, SmolLM2, and other models with Llama's architecture."""

from typing import Any

from xla_engine.model_loader.families.family import Family, Tensors
from xla_engine.model_loader.json_fields import Fields

MODEL: Tensors = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
ATTENTION: Tensors = {
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
}
MLP: Tensors = {
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
PRE_NORMS: Tensors = {
    "input_norm": ("input_layernorm.weight",),
    "pre_feedforward_norm": ("post_attention_layernorm.weight",),
}
HEAD_NORMS: Tensors = {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)}
TENSORS: Tensors = MODEL | ATTENTION | MLP | PRE_NORMS


def biases(fields: Fields) -> dict[str, Any]:
    """Llama's two bias flags."""
    attention, mlp = (fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    tensors=TENSORS,
    reads=("attention_bias", "mlp_bias"),
    flags=biases,
)
