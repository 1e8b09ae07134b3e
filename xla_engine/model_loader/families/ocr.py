"""Families that read pages: PaddleOCR-VL."""

from typing import Any

from xla_engine.model_loader.families.family import siglip, with_bias, within_vision_model
from xla_engine.model_loader.families.variants import ERNIE4_5
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
