"""Cases of `make_golden_families.py` whose recurrent layers are short convolutions or Mamba-2."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
_LFM2 = {**_SIZES, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}

# name -> (architecture, weights' deviation, configuration)
HYBRIDS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2ForCausalLM",
        0.3,
        {**_LFM2, "intermediate_size": 60, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.1},
    ),
    "lfm2_bias": (
        "Lfm2ForCausalLM",
        0.3,
        {**_LFM2, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "conv_bias": True}
        | {"conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        0.3,
        {**_LFM2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.3},
    ),
}
