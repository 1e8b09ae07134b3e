"""SmolLM3: a Llama in which some layers have no rotary embedding."""

from typing import Any

from xla_engine.model_loader.families.family import Family
from xla_engine.model_loader.families.llama import TENSORS, biases
from xla_engine.model_loader.families.qwen import windows
from xla_engine.model_loader.families.windows import layer_count
from xla_engine.model_loader.json_fields import Fields


def _smollm3(fields: Fields) -> dict[str, Any]:
    """`no_rope_layers` is 0 for layers without rotary embedding, and 1 for others."""
    count = layer_count(fields)
    rotates = fields.values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", high=2**31 - 1, default=4)
        rotates = [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or any(each not in (0, 1) for each in rotates):
        fields.fail("no_rope_layers", f"must be {count} times 0 or 1. Correct the file")
    still = tuple(index for index in range(count) if not rotates[index])
    flags = windows(Fields(fields.file, {**fields.values, "max_window_layers": 0}))
    if flags and not fields.given("layer_types"):
        types = ("sliding_attention" if index in still else "full_attention" for index in range(count))
        flags["layer_types"] = tuple(types)
    return {"no_rope_layers": still, **biases(fields), **flags}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    tensors=TENSORS,
    reads=(
        *("attention_bias", "mlp_bias", "no_rope_layers", "use_sliding_window", "sliding_window"),
        *("layer_types", "pretraining_tp"),  # this architecture ignores these
    ),
    flags=_smollm3,
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768},
    rope_theta=2e6,
)
