"""Phi-3, 3.5 and 4: a Llama with fused tensors, LongRoPE and partial rotary embedding."""

from typing import Any

from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import ATTENTION, MLP, MODEL, PRE_NORMS
from xla_engine.model_loader.families.windows import every, sliding
from xla_engine.model_loader.json_fields import Fields

_FUSED = {"qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}


def _windows(fields: Fields) -> dict[str, Any]:
    return sliding(fields, every)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    tensors=MODEL | ATTENTION | MLP | PRE_NORMS | _FUSED,
    reads=("sliding_window", "partial_rotary_factor"),
    flags=_windows,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)
