"""Gemma 1, 2 and 3: scaled embeddings, GeGLU, norm weights stored minus one; later caps, windows, more norms; Gemma 3
also with a SigLIP tower."""

from dataclasses import replace
from typing import Any

from xla_engine.model_loader.families.family import ACTIVATIONS, Family, siglip, within_vision_model
from xla_engine.model_loader.families.llama import ATTENTION, HEAD_NORMS, MLP, MODEL, PRE_NORMS
from xla_engine.model_loader.families.windows import all_but_each, sliding
from xla_engine.model_loader.json_fields import Fields

_FOUR_NORMS = {
    "input_norm": ("input_layernorm.weight",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "pre_feedforward_norm": ("pre_feedforward_layernorm.weight",),
    "post_feedforward_norm": ("post_feedforward_layernorm.weight",),
}
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_LATER_DEFAULTS = {  # of Gemma 2 and 3
    **_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", default=False)
    return {
        "embedding_multiplier": fields.integer("hidden_size", high=2**20) ** 0.5,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    return {
        **_gemma(fields),
        **sliding(fields, all_but_each(2)),
        **{name: fields.number(name, high=1e6) for name in _CAPS if fields.given(name)},
        "post_norm": True,
        "attention_multiplier": fields.number("query_pre_attn_scalar", high=1e6) ** -0.5,
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    pattern = fields.integer("sliding_window_pattern", high=2**12, default=6)
    return {**_gemma2(fields), **sliding(fields, all_but_each(pattern)), "qk_norm": "head"}


GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    tensors=MODEL | ATTENTION | MLP | PRE_NORMS,
    reads=("attention_bias",),
    flags=_gemma,
    defaults={**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    activations={"gelu": "gelu_tanh", **ACTIVATIONS},  # old files say gelu but mean this
    norm_offset=1.0,
)
GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    tensors=MODEL | ATTENTION | MLP | _FOUR_NORMS,
    reads=("attention_bias", "sliding_window", "layer_types", *_CAPS),
    flags=_gemma2,
    defaults={**_LATER_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    tensors={**GEMMA2.tensors, **HEAD_NORMS},
    flags=_gemma3,
    defaults={
        **_LATER_DEFAULTS,
        "rope_local_base_freq": 10000.0,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "vocab_size": 262208,
    },
    rope_theta=1e6,
    rope_local=True,
)
GEMMA3_VISION = replace(
    within_vision_model(GEMMA3, "Gemma3ForConditionalGeneration", "gemma3"),
    vision={
        **siglip("vision_tower.vision_model."),
        "soft_norm": ("multi_modal_projector.mm_soft_emb_norm.weight",),
        "projection": ("multi_modal_projector.mm_input_projection_weight",),
    },
)
