"""Model families as data: one `Family` for each architecture name in config.json."""

from typing import Any

from xla_engine.model_loader.families import (
    deltas,
    dense,
    experts,
    gemma3n,
    gemma4,
    hybrids,
    latent,
    mamba,
    ocr,
    variants,
)
from xla_engine.model_loader.families.dense import LLAMA, QWEN2, QWEN3
from xla_engine.model_loader.families.encoders import ENCODERS, encoder_fields, encoder_of
from xla_engine.model_loader.families.family import Family, Source, tensor_sources

__all__ = [
    "ENCODERS",
    "FAMILIES",
    "LLAMA",
    "OTHER_DECODERS",
    "QWEN2",
    "QWEN3",
    "Family",
    "Source",
    "encoder_fields",
    "encoder_of",
    "tensor_sources",
]

_ALL = (
    *(
        LLAMA,
        dense.SMOLLM3,
        dense.MISTRAL,
        dense.MINISTRAL,
        dense.MINISTRAL3,
        QWEN2,
        QWEN3,
        dense.GEMMA,
        dense.GEMMA2,
    ),
    *(dense.GEMMA3, dense.PHI3, dense.OLMO2, dense.OLMO3, dense.GRANITE, dense.GEMMA3_VISION),
    dense.GEMMA3_TEXT,
    *(dense.MISTRAL3, experts.QWEN3_5_VISION, dense.QWEN3_VL, dense.IDEFICS3, dense.SMOLVLM),
    *(dense.COHERE, dense.COHERE2, experts.MIXTRAL, experts.QWEN3_MOE, experts.GPT_OSS),
    *(experts.GLM4_MOE, experts.QWEN3_VL_MOE),
    variants.HUNYUAN,
    *(experts.QWEN3_NEXT, experts.QWEN3_5, experts.QWEN3_5_MOE, experts.QWEN3_5_MOE_VISION),
    *(variants.SEED_OSS, variants.ERNIE4_5, variants.HELIUM, variants.EXAONE4, variants.GLM, variants.GLM4),
    *(hybrids.LFM2, hybrids.LFM2_MOE, deltas.OLMO_HYBRID, deltas.KIMI_LINEAR),
    *(gemma4.GEMMA4, gemma4.GEMMA4_VISION, gemma3n.GEMMA3N, gemma3n.GEMMA3N_VISION),
    *(latent.DEEPSEEK_V2, latent.DEEPSEEK_V3, latent.GLM4_MOE_LITE),
    *(mamba.GRANITE_HYBRID, mamba.FALCON_H1, mamba.NEMOTRON_H, mamba.MAMBA2),
    *(variants.STABLELM, variants.STARCODER2, variants.PHI),
    *(ocr.PADDLEOCR_VL, ocr.GLM_OCR, ocr.DEEPSEEK_OCR2, ocr.DEEPSEEK_OCR2_PUBLISHED),
)
OTHER_DECODERS: dict[tuple[str, Any], Family] = {  # of the same vision model, by the type of text_config
    (family.architecture, family.text_type): family for family in (dense.MINISTRAL3_VISION,)
}
FAMILIES = {family.architecture: family for family in _ALL}
