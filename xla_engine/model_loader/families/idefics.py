"""Idefics3 and SmolVLM: a Llama that also reads pictures, through a SigLIP tower and a connector."""

from dataclasses import replace

from xla_engine.model_loader.families.family import siglip
from xla_engine.model_loader.families.llama import LLAMA

VISION = {**siglip("model.vision_model."), "projection": ("model.connector.modality_projection.proj.weight",)}
IDEFICS3 = replace(
    LLAMA,
    architecture="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    tensors={
        **LLAMA.tensors,
        "embed": ("model.text_model.embed_tokens.weight",),
        "final_norm": ("model.text_model.norm.weight",),
    },
    layer="model.text_model.layers.{index}.",
    ignores=r"model\.(vision_model|connector)\..*",
    text_type="llama",
    vision=VISION,
)
SMOLVLM = replace(IDEFICS3, architecture="SmolVLMForConditionalGeneration", model_type="smolvlm")
