"""Cohere Command-R (1 and 2): LayerNorm, parallel attention and MLP, interleaved rotary pairs, scaled logits."""

from typing import Any

from xla_engine.graphs.config import SLIDING
from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import ATTENTION, MLP, MODEL
from xla_engine.model_loader.families.windows import all_but_each, layer_count, sliding
from xla_engine.model_loader.json_fields import Fields

_TENSORS = MODEL | ATTENTION | MLP | {"input_norm": ("input_layernorm.weight",)}
_DEFAULTS = {"tie_word_embeddings": True, "logit_scale": 0.0625, "max_position_embeddings": 8192}


def _cohere(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", default=False)
    return {
        "layer_norm": True,
        "use_parallel_residual": True,
        "rope_interleaved": True,
        "qkv_bias": bias,
        "output_bias": bias,
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
    tensors=_TENSORS,
    reads=("attention_bias", "logit_scale"),
    flags=_cohere,
    defaults=_DEFAULTS,
    rope_theta=500000.0,
)
COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    tensors=_TENSORS,
    reads=("attention_bias", "logit_scale", "sliding_window", "layer_types"),
    flags=_cohere2,
    defaults={**_DEFAULTS, "sliding_window": 4096},
)
