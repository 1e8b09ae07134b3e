"""Cases of `make_golden_families.py` with recurrent layers: short convolutions, Mamba-2, later forms of DeltaNet."""

from __future__ import annotations

import re
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
_LFM2 = {**_SIZES, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_BLOCKS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
_GRANITE = {
    **_SIZES,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "shared_intermediate_size": 36,
    "mamba_d_state": 12,
    "mamba_expand": 2,
}
_OLMO = {
    **_SIZES,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
}
_KIMI = {
    **_SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

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
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        0.3,
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20}
        | {"mamba_n_heads": 10, "mamba_d_head": 8, "mamba_n_groups": 2},
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybridForCausalLM",
        0.3,
        {**_GRANITE, "num_local_experts": 0, "mamba_n_heads": 4, "mamba_d_head": 20, "mamba_n_groups": 1}
        | {"position_embedding_type": "rope", "tie_word_embeddings": True, "mamba_proj_bias": True},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        0.3,
        {**_SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
        | {"mamba_d_state": 12, "lm_head_multiplier": 0.7, "embedding_multiplier": 1.5, "key_multiplier": 0.8}
        | {"mlp_multipliers": [0.7, 1.2], "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.3}
        | {"ssm_multipliers": [0.6, 1.1, 0.9, 1.2, 0.8], "ssm_in_multiplier": 1.25}
        | {"ssm_out_multiplier": 0.75},
    ),
    "falcon_h1_norm": (
        "FalconH1ForCausalLM",
        0.3,
        {**_SIZES, "mamba_d_ssm": 48, "mamba_n_heads": 3, "mamba_d_head": 16, "mamba_n_groups": 1}
        | {"num_hidden_layers": 2, "mamba_d_state": 16, "mamba_rms_norm": True, "tie_word_embeddings": True},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        0.3,
        {**_SIZES, "num_hidden_layers": 5, "layer_types": _BLOCKS, "head_dim": 16, "n_groups": 2}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 12, "intermediate_size": 44}
        | {"expand": 2, "time_step_min": 1e-9, "use_conv_bias": True},
    ),
    "nemotron_3": (
        "NemotronHForCausalLM",
        0.3,
        {**_SIZES, "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "moe"]}
        | {"num_hidden_layers": 5, "head_dim": 16, "n_groups": 1, "mamba_num_heads": 3, "mamba_head_dim": 16}
        | {"ssm_state_size": 12, "intermediate_size": 44, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "nemotron_3_latent": (
        "NemotronHForCausalLM",
        0.3,
        {**_SIZES, "layer_types": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"num_hidden_layers": 4, "head_dim": 8, "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 8}
        | {"ssm_state_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_latent_size": 24}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        0.3,
        {"hidden_size": 40, "num_hidden_layers": 3, "num_heads": 5, "head_dim": 16, "state_size": 12}
        | {"expand": 2, "n_groups": 1, "tie_word_embeddings": True},
    ),
    "olmo_hybrid": (  # without rotary embedding, as published
        "OlmoHybridForCausalLM",
        0.4,
        {**_OLMO, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
        | {"linear_value_head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo_hybrid_rope": (  # sizes that the C++ rule takes
        "OlmoHybridForCausalLM",
        0.4,
        {**_OLMO, "num_key_value_heads": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_allow_neg_eigval": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "attention_bias": True},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        0.4,
        {**_KIMI, "linear_num_heads": 3, "linear_head_dim": 12, "norm_topk_prob": False},
    ),
    "kimi_linear_shared": (  # sizes that the C++ rule takes
        "KimiLinearForCausalLM",
        0.4,
        {**_KIMI, "linear_num_heads": 2, "linear_head_dim": 16, "linear_conv_kernel_dim": 3}
        | {"n_shared_experts": 2, "q_lora_rank": 20},
    ),
}


def published_olmo(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of OLMo Hybrid as in published files. `save_pretrained` (transformers 5.24) gives the norms of
    attention layers the names of others, and cuts the filters of queries, keys and values into equal parts."""
    c, found = model.config, {}
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    sizes = [keys, keys, c.linear_num_value_heads * c.linear_value_head_dim]
    recurrent = {f"model.layers.{at}" for at, kind in enumerate(c.layer_types) if kind == "linear_attention"}
    for name, tensor in model.state_dict().items():
        if name.endswith("linear_attn.conv1d.weight"):
            for part, filters in zip("qkv", tensor.split(sizes), strict=True):
                found[name.replace("conv1d", f"{part}_conv1d")] = filters.clone()
            continue
        if re.sub(r"(\.\d+)\..*", r"\1", name) in recurrent:
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        found[name] = tensor.clone()
    return found


def published_kimi(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of Kimi Linear as in published files."""
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("forget_gate.", "")
        routed = re.sub(r"mlp\.(gate\.|experts|shared_experts)", r"block_sparse_moe.\1", name)
        if name.endswith("self_attn.conv1d.weight"):
            for part, filters in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace("conv1d", f"{part}_conv1d")] = filters.clone()
        elif name.endswith("experts.gate_up_proj"):
            for at, both in enumerate(tensor):
                for part, rows in zip(("w1", "w3"), both.chunk(2), strict=True):
                    found[routed.replace("gate_up_proj", f"{at}.{part}.weight")] = rows.clone()
        elif name.endswith("experts.down_proj"):
            found |= {
                routed.replace("down_proj", f"{at}.w2.weight"): rows.clone() for at, rows in enumerate(tensor)
            }
        else:
            found[routed] = tensor.clone()
    return found


# model_type -> the tensors of a model as published files have them, where `save_pretrained` writes others
PUBLISHED = {"olmo_hybrid": published_olmo, "kimi_linear": published_kimi}
