"""OLMo 2 and 3: norms only after attention and MLP, and one norm over all query heads and one over all key heads."""

from typing import Any

from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import ATTENTION, HEAD_NORMS, MLP, MODEL
from xla_engine.model_loader.families.windows import all_but_each, sliding
from xla_engine.model_loader.json_fields import Fields

_TENSORS = (
    MODEL
    | ATTENTION
    | MLP
    | HEAD_NORMS
    | {
        "post_attention_norm": ("post_attention_layernorm.weight",),
        "post_feedforward_norm": ("post_feedforward_layernorm.weight",),
    }
)


def _olmo2(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", default=False)
    return {"pre_norm": False, "post_norm": True, "qk_norm": "all", "qkv_bias": bias, "output_bias": bias}


def _olmo3(fields: Fields) -> dict[str, Any]:
    return {**_olmo2(fields), **sliding(fields, all_but_each(4))}


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    tensors=_TENSORS,
    reads=("attention_bias",),
    flags=_olmo2,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    tensors=_TENSORS,
    reads=("attention_bias", "sliding_window", "layer_types"),
    flags=_olmo3,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    rope_theta=500000.0,
    rope_local=True,
)
