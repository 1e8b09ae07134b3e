"""Granite 3: a Llama with four multipliers."""

from typing import Any

from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import TENSORS, biases
from xla_engine.model_loader.json_fields import Fields

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
