"""Idefics3 and SmolVLM: a Llama that also reads pictures, through a SigLIP tower and a connector."""

from dataclasses import replace

from xla_engine.model_loader.families.llama import LLAMA

_Names = dict[str, tuple[str, ...]]

_TOWER = "model.vision_model."
_LAYER = _TOWER + "encoder.layers.{index}."


def _with_bias(leaf: str, *names: str) -> _Names:
    return {
        leaf: tuple(f"{name}.weight" for name in names),
        f"{leaf}_bias": tuple(f"{name}.bias" for name in names),
    }


VISION: _Names = {
    **_with_bias("patch", f"{_TOWER}embeddings.patch_embedding"),
    "positions": (f"{_TOWER}embeddings.position_embedding.weight",),
    **_with_bias("norm1", f"{_LAYER}layer_norm1"),
    **_with_bias("qkv", *(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")),
    **_with_bias("output", f"{_LAYER}self_attn.out_proj"),
    **_with_bias("norm2", f"{_LAYER}layer_norm2"),
    **_with_bias("up", f"{_LAYER}mlp.fc1"),
    **_with_bias("down", f"{_LAYER}mlp.fc2"),
    **_with_bias("final_norm", f"{_TOWER}post_layernorm"),
    "projection": ("model.connector.modality_projection.proj.weight",),
}
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
