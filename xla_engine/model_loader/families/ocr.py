"""Families that read pages: PaddleOCR-VL, GLM-OCR and DeepSeek-OCR-2."""

from dataclasses import replace
from typing import Any

from xla_engine.model_loader.families.dense import TENSORS
from xla_engine.model_loader.families.experts import GLM4_MOE, QWEN_EXPERTS
from xla_engine.model_loader.families.family import siglip, with_bias, within_vision_model
from xla_engine.model_loader.families.latent import DEEPSEEK_V2, SOFTMAX_METHODS, mixture
from xla_engine.model_loader.families.variants import ERNIE4_5, GLM4
from xla_engine.model_loader.json_fields import Fields


def _paddle(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("use_bias", default=False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


# ERNIE 4.5 with rotary pairs of halves, a SigLIP tower that turns by rows and columns, and a merger.
PADDLEOCR_VL = within_vision_model(
    ERNIE4_5,
    "PaddleOCRVLForConditionalGeneration",
    "paddleocr_vl",
    model="model.",
    ignores=r"(visual|mlp_AR)\..*",
    text_type="paddleocr_vl_text",
    flags=_paddle,
    vision={
        **siglip("visual.vision_model."),
        **with_bias("merge_norm", "mlp_AR.pre_norm"),
        **with_bias("merge_up", "mlp_AR.linear_1"),
        **with_bias("merge_down", "mlp_AR.linear_2"),
    },
)


def _glm_tower(tower: str) -> dict[str, tuple[str, ...]]:
    """The tensors of the tower of `graphs.vision.glm_ocr` by leaf. tower: prefix of their names."""
    layer, merger = tower + "blocks.{index}.", tower + "merger."
    return {
        **with_bias("patch", f"{tower}patch_embed.proj"),
        "norm1": (f"{layer}norm1.weight",),
        "norm2": (f"{layer}norm2.weight",),
        "q_norm": (f"{layer}attn.q_norm.weight",),
        "k_norm": (f"{layer}attn.k_norm.weight",),
        **with_bias("qkv", f"{layer}attn.qkv"),
        **with_bias("output", f"{layer}attn.proj"),
        **with_bias("gate_up", f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        **with_bias("down", f"{layer}mlp.down_proj"),
        "final_norm": (f"{tower}post_layernorm.weight",),
        **with_bias("downsample", f"{tower}downsample"),
        "merge": (f"{merger}proj.weight",),
        **with_bias("merge_norm", f"{merger}post_projection_norm"),
        "merge_gate_up": (f"{merger}gate_proj.weight", f"{merger}up_proj.weight"),
        "merge_down": (f"{merger}down_proj.weight",),
    }


# GLM 4 without biases, and a tower with gated MLPs. Published files have a layer more, for multi-token prediction.
GLM_OCR = within_vision_model(
    GLM4,
    "GlmOcrForConditionalGeneration",
    "glm_ocr",
    model="model.language_model.",
    ignores=r"model\.visual\..*|model\.language_model\.layers\.LAYERS\..*",
    text_type="glm_ocr_text",
    flags=lambda _: {"post_norm": True, "rope_interleaved": True},
    reads=("partial_rotary_factor",),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    vision=_glm_tower("model.visual."),
)


def _deepseek(fields: Fields) -> dict[str, Any]:
    """DeepSeek V2's experts behind plain attention."""
    if fields.flag("use_mla", default=False) or fields.given("kv_lora_rank"):
        fields.fail("use_mla", "not supported (latent attention) for DeepSeek-OCR-2. Use a plain checkpoint")
    if fields.flag("norm_topk_prob", default=False):
        fields.fail(
            "norm_topk_prob",
            "not supported (weights that sum to one) for DeepSeek-OCR-2. Use a plain checkpoint",
        )
    if fields.values.get("scoring_func") not in (None, "softmax"):
        fields.fail("scoring_func", "only softmax is supported. Use such a checkpoint")
    return mixture(fields, SOFTMAX_METHODS)


def _deep_encoder(model: str) -> dict[str, tuple[str, ...]]:
    """The tensors of the tower of `graphs.vision.deep_encoder` by leaf, with the group of a leaf that is in no layer
    of the first stage. model: prefix of their names."""
    sam, second = f"{model}sam_model.", f"{model}qwen2_model."
    layer, encoder = sam + "blocks.{index}.", second + "model.model.layers.{index}."
    attention = f"{encoder}self_attn."
    return {
        **with_bias("patch", f"{sam}patch_embed.proj"),
        "positions": (f"{sam}pos_embed",),
        **with_bias("norm1", f"{layer}norm1"),
        **with_bias("qkv", f"{layer}attn.qkv"),
        "relative_rows": (f"{layer}attn.rel_pos_h",),
        "relative_columns": (f"{layer}attn.rel_pos_w",),
        **with_bias("output", f"{layer}attn.proj"),
        **with_bias("norm2", f"{layer}norm2"),
        **with_bias("up", f"{layer}mlp.lin1"),
        **with_bias("down", f"{layer}mlp.lin2"),
        "neck.narrow": (f"{sam}neck.0.weight",),
        **with_bias("neck.narrow_norm", f"{sam}neck.1"),
        "neck.mix": (f"{sam}neck.2.weight",),
        **with_bias("neck.mix_norm", f"{sam}neck.3"),
        "neck.halve": (f"{sam}net_2.weight",),
        "neck.quarter": (f"{sam}net_3.weight",),
        "neck.queries_crop": (f"{second}query_768.weight",),
        "neck.queries_view": (f"{second}query_1024.weight",),
        "encoder.norm1": (f"{encoder}input_layernorm.weight",),
        **with_bias("encoder.queries", f"{attention}q_proj"),
        **with_bias("encoder.keys_values", f"{attention}k_proj", f"{attention}v_proj"),
        "encoder.output": (f"{attention}o_proj.weight",),
        "encoder.norm2": (f"{encoder}post_attention_layernorm.weight",),
        "encoder.gate_up": (f"{encoder}mlp.gate_proj.weight", f"{encoder}mlp.up_proj.weight"),
        "encoder.down": (f"{encoder}mlp.down_proj.weight",),
        "final_norm": (f"{second}model.model.norm.weight",),
        **with_bias("projection", f"{model}projector.layers"),
        "separator": (f"{model}view_seperator",),  # the checkpoints' own spelling
    }


# DeepSeek V2's experts behind plain attention, and a tower of two encoders.
DEEPSEEK_OCR2 = within_vision_model(
    replace(
        DEEPSEEK_V2,
        tensors={
            **TENSORS,
            **QWEN_EXPERTS,
            **{leaf: GLM4_MOE.tensors[leaf] for leaf in ("experts.shared_gate_up", "experts.shared_down")},
        },
        reads=("pretraining_tp",),  # which this architecture ignores
    ),
    "DeepseekOcr2ForConditionalGeneration",
    "deepseek_ocr2",
    model="model.",
    ignores=r"model\.(sam_model|qwen2_model|projector)\..*|model\.view_seperator",
    text_type="deepseek_ocr2_text",
    flags=_deepseek,
    defaults={
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    vision=_deep_encoder("model."),
)
DEEPSEEK_OCR2_PUBLISHED = replace(
    DEEPSEEK_OCR2,
    architecture="DeepseekOCR2ForCausalLM",
    model_type="deepseek_vl_v2",
    text_type="deepseek_v2",
)
