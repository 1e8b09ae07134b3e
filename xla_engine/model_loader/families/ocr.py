"""Families that read pages: PaddleOCR-VL and GLM-OCR."""

from typing import Any

from xla_engine.model_loader.families.family import siglip, with_bias, within_vision_model
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
