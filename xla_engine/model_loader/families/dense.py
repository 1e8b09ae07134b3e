"""Families of decoders without experts: Llama, and what Mistral, Phi, Granite, Qwen, SmolLM, Gemma, OLMo and Cohere
do differently."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xla_engine.graphs.config import FULL, SLIDING
from xla_engine.model_loader.families.family import (
    ACTIVATIONS,
    Family,
    Tensors,
    siglip,
    with_bias,
    within_vision_model,
)
from xla_engine.model_loader.json_fields import Fields

_LARGEST = 2**31 - 1


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=2**12)


def all_but_each(pattern: int) -> Callable[[int], bool]:
    """The last of every `pattern` layers has full attention, the others sliding windows."""
    return lambda index: (index + 1) % pattern != 0


def layer_types(fields: Fields, other: str, is_other: Callable[[int], bool]) -> list[str]:
    """The type of each layer, FULL or `other`; `is_other` gives the types if the file does not."""
    count = layer_count(fields)
    types = fields.values.get("layer_types")
    if types is None:
        types = [other if is_other(index) else FULL for index in range(count)]
    if not isinstance(types, list) or len(types) != count or any(each not in (FULL, other) for each in types):
        fields.fail("layer_types", f'must be {count} times "{FULL}" or "{other}". Correct the file')
    return types


def sliding(fields: Fields, slides: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """The flags for `sliding_window` and `layer_types`; `slides` gives the types if the file does not.

    Without a window every layer has full attention.
    """
    windowed = fields.given("sliding_window")
    types = layer_types(fields, SLIDING, lambda index: windowed and slides(index))
    if SLIDING not in types:
        return {}
    if not windowed:
        fields.fail("sliding_window", "must be given: layer_types names sliding layers. Correct the file")
    return {"layer_types": tuple(types), "sliding_window": fields.integer("sliding_window", high=_LARGEST)}


def attention_bias(fields: Fields, *, default: bool = False) -> dict[str, Any]:
    """The biases of all projections of attention, or of none."""
    bias = fields.flag("attention_bias", default=default)
    return {"qkv_bias": bias, "output_bias": bias}


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
    return {**attention_bias(fields), "mlp_bias": fields.flag("mlp_bias", default=False)}


# Llama 2 to 3.2, TinyLlama, SmolLM2, and other models with Llama's architecture.
LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    tensors=TENSORS,
    reads=("attention_bias", "mlp_bias"),
    flags=biases,
)
_APART: dict[str, Any] = {  # where the decoder of a vision-language model is a model of its own
    "model": "language_model.model.",
    "head": "language_model.lm_head.weight",
    "ignores": r"(vision_tower|multi_modal_projector)\..*",
}
# A Llama with sliding windows.
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    tensors=TENSORS,
    reads=("sliding_window",),
    flags=sliding,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    tensors=TENSORS,
    reads=("sliding_window", "layer_types"),
    flags=sliding,
    defaults=MISTRAL.defaults,
)
MISTRAL3 = within_vision_model(MISTRAL, "Mistral3ForConditionalGeneration", "mistral3", **_APART)
# A Mistral whose queries are scaled by position.
MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    tensors=TENSORS,
    reads=("sliding_window", "llama_4_scaling_beta"),
    flags=sliding,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    },
    rope_theta=1e6,
)
MINISTRAL3_VISION = within_vision_model(MINISTRAL3, "Mistral3ForConditionalGeneration", "mistral3", **_APART)
# A Llama with fused tensors, LongRoPE and partial rotary embedding.
FUSED: Tensors = {"qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}
PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    tensors=TENSORS | FUSED,
    reads=("sliding_window", "partial_rotary_factor"),
    flags=sliding,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)


# A Llama with four multipliers.
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")


def _granite(fields: Fields) -> dict[str, Any]:
    return {
        **biases(fields),
        **{name: fields.number(name, high=1e6, default=1.0) for name in _MULTIPLIERS},
        "logit_scale": 1 / fields.number("logits_scaling", high=1e6, default=1.0),
    }


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    tensors=TENSORS,
    reads=("attention_bias", "mlp_bias", "logits_scaling", *_MULTIPLIERS),
    flags=_granite,
)


# Qwen2 has biases on q, k and v; Qwen3 normed query and key heads; Qwen3-VL reads pictures.
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
    return {"qk_norm": "head", **attention_bias(fields), **windows(fields)}


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
    """The tensors of the tower of `graphs.vision.qwen_vl` by leaf. tower: prefix of their names."""
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


LANGUAGE_MODEL = "model.language_model."  # prefix of the decoder in Qwen's vision-language models
QWEN3_VL = within_vision_model(
    QWEN3,
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    model=LANGUAGE_MODEL,
    ignores=r"model\.visual\..*",
    text_type="qwen3_vl_text",
    defaults={**QWEN3.defaults, "max_position_embeddings": 128000},
    rope_theta=500000.0,
    vision=patch_tower("model.visual.", taps=True),
)


def _smollm3(fields: Fields) -> dict[str, Any]:
    """A Llama in which some layers have no rotary embedding: `no_rope_layers` is 0 for these, and 1 for others."""
    count = layer_count(fields)
    rotates = fields.values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", high=2**31 - 1, default=4)
        rotates = [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or any(each not in (0, 1) for each in rotates):
        fields.fail("no_rope_layers", f"must be {count} times 0 or 1. Correct the file")
    still = tuple(index for index in range(count) if not rotates[index])
    flags = windows(Fields(fields.file, {**fields.values, "max_window_layers": 0}))
    if flags and not fields.given("layer_types"):
        types = (SLIDING if index in still else FULL for index in range(count))
        flags["layer_types"] = tuple(types)
    return {"no_rope_layers": still, **biases(fields), **flags}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    tensors=TENSORS,
    reads=(
        *("attention_bias", "mlp_bias", "no_rope_layers", "use_sliding_window", "sliding_window"),
        *("layer_types", "pretraining_tp"),  # this architecture ignores these
    ),
    flags=_smollm3,
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768},
    rope_theta=2e6,
)


# Gemma has scaled embeddings, GeGLU and norm weights stored minus one; Gemma 2 also caps, windows and more norms.
FOUR_NORMS: Tensors = {
    "input_norm": ("input_layernorm.weight",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "pre_feedforward_norm": ("pre_feedforward_layernorm.weight",),
    "post_feedforward_norm": ("post_feedforward_layernorm.weight",),
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
_LATER_DEFAULTS = {  # of Gemma 2 and 3
    **_GEMMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma(fields: Fields) -> dict[str, Any]:
    return {
        **attention_bias(fields),
        "embedding_multiplier": fields.integer("hidden_size", high=2**20) ** 0.5,
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
    tensors=TENSORS,
    reads=("attention_bias",),
    flags=_gemma,
    defaults={**_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    activations={"gelu": "gelu_tanh", **ACTIVATIONS},  # old files say gelu but mean this
    norm_offset=1.0,
)
GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    tensors=MODEL | ATTENTION | MLP | FOUR_NORMS,
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


def _gemma3_text(fields: Fields) -> dict[str, Any]:
    """If all tokens see each other (EmbeddingGemma), half of a window lies before a token, and half behind it."""
    flags = _gemma3(fields)
    if fields.flag("use_bidirectional_attention", default=False) and "sliding_window" in flags:
        flags["sliding_window"] = flags["sliding_window"] // 2 + 1
    return flags


GEMMA3_TEXT = replace(
    GEMMA3,
    architecture="Gemma3TextModel",
    reads=(*GEMMA3.reads, "use_bidirectional_attention"),
    flags=_gemma3_text,
)
GEMMA3_VISION = within_vision_model(
    GEMMA3,
    "Gemma3ForConditionalGeneration",
    "gemma3",
    **_APART,
    vision={
        **siglip("vision_tower.vision_model."),
        "soft_norm": ("multi_modal_projector.mm_soft_emb_norm.weight",),
        "projection": ("multi_modal_projector.mm_input_projection_weight",),
    },
)


# OLMo has norms only after attention and MLP, and one norm over all query heads and one over all key heads.
OLMO: Tensors = {
    **MODEL,
    **ATTENTION,
    **MLP,
    **HEAD_NORMS,
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "post_feedforward_norm": ("post_feedforward_layernorm.weight",),
}


def _olmo2(fields: Fields) -> dict[str, Any]:
    return {"pre_norm": False, "post_norm": True, "qk_norm": "all", **attention_bias(fields)}


def _olmo3(fields: Fields) -> dict[str, Any]:
    return {**_olmo2(fields), **sliding(fields, all_but_each(4))}


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    tensors=OLMO,
    reads=("attention_bias",),
    flags=_olmo2,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    tensors=OLMO,
    reads=("attention_bias", "sliding_window", "layer_types"),
    flags=_olmo3,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    rope_theta=500000.0,
    rope_local=True,
)


# Command-R has LayerNorm, parallel attention and MLP, interleaved rotary pairs and scaled logits.
_COHERE: Tensors = MODEL | ATTENTION | MLP | {"input_norm": ("input_layernorm.weight",)}
_COHERE_DEFAULTS = {"tie_word_embeddings": True, "logit_scale": 0.0625, "max_position_embeddings": 8192}


def _cohere(fields: Fields) -> dict[str, Any]:
    return {
        "layer_norm": True,
        "use_parallel_residual": True,
        "rope_interleaved": True,
        **attention_bias(fields),
        "rms_norm_eps": fields.number("layer_norm_eps", high=1.0, default=1e-5),
        "logit_scale": fields.number("logit_scale", high=1e6, default=1.0),
    }


def _cohere2(fields: Fields) -> dict[str, Any]:
    """Layers with full attention have no rotary embedding."""
    pattern = fields.integer("sliding_window_pattern", high=2**12, default=4)
    flags = sliding(fields, all_but_each(pattern))
    types = flags.get("layer_types", ())
    if not types:
        fields.fail("sliding_window", "must be given: only sliding layers rotate. Correct the file")
    still = tuple(index for index in range(layer_count(fields)) if types[index] != SLIDING)
    return {**_cohere(fields), **flags, "no_rope_layers": still}


COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    tensors=_COHERE,
    reads=("attention_bias", "logit_scale"),
    flags=_cohere,
    defaults=_COHERE_DEFAULTS,
    rope_theta=500000.0,
)
COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    tensors=_COHERE,
    reads=("attention_bias", "logit_scale", "sliding_window", "layer_types"),
    flags=_cohere2,
    defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
)


# Idefics3 and SmolVLM read pictures through a SigLIP tower and a connector.
IDEFICS3 = within_vision_model(
    LLAMA,
    "Idefics3ForConditionalGeneration",
    "idefics3",
    model="model.text_model.",
    ignores=r"model\.(vision_model|connector)\..*",
    vision={
        **siglip("model.vision_model."),
        "projection": ("model.connector.modality_projection.proj.weight",),
    },
)
SMOLVLM = replace(IDEFICS3, architecture="SmolVLMForConditionalGeneration", model_type="smolvlm")
