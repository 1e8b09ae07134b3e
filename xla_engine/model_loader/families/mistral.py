"""Mistral and Ministral: a Llama with sliding windows."""

from typing import Any

from xla_engine.model_loader.families.family import Family, within_vision_model
from xla_engine.model_loader.families.llama import TENSORS
from xla_engine.model_loader.families.windows import every, sliding
from xla_engine.model_loader.json_fields import Fields


def _windows(fields: Fields) -> dict[str, Any]:
    return sliding(fields, every)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    tensors=TENSORS,
    reads=("sliding_window",),
    flags=_windows,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    tensors=TENSORS,
    reads=("sliding_window", "layer_types"),
    flags=_windows,
    defaults=MISTRAL.defaults,
)
MISTRAL3 = within_vision_model(MISTRAL, "Mistral3ForConditionalGeneration", "mistral3")
