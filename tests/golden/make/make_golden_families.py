"""Make the golden files of the model families: tiny random configurations of transformers' own architectures.

    python tests/golden/make/make_golden_families.py [NAME ...]     # all that are named; without a name, all

Run with the `oracle` extra installed. `tests/golden/families/NAME/` is a model directory, weights in bfloat16, plus
`golden.npz`, what transformers computes of it in float32:

    prompts   int32 [N, L]      token ids, padded with -1: shorter and longer than windows and chunks
    tokens    int32 [N, 48]     greedy continuation, eos ids ignored
    gaps      float32 [N, 48]   logit of the chosen token less the next best
    logits    float32 [N, V]    logits at the last prompt position

Of families whose pictures are supported also:

    tiles     uint8 [2, T, T, 3]          random pixels
    features  float32 [2, tokens, text]   what the decoder reads of them, pixels scaled to [-1, 1]

Of towers over patches, `tile0`, `features0`, ... for each of `GRIDS`: [tokens, (1 + taps) text], of taps behind.

Every token comes from one forward pass, without a cache, over sequences of exactly LENGTH positions: what stands
behind a position changes nothing before it, and rope scalings that look at a sequence's length see LENGTH always, as
in an engine with that `max_model_len`. It imports nothing of this package.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.set_num_threads(1)  # sums in one order on every machine

GOLDEN = Path(__file__).parents[2] / "golden" / "families"
LENGTH, NEW_TOKENS, VOCABULARY = 160, 48, 199
PROMPT_LENGTHS = (1, 7, 16, 31, 33, 64, 90, 112)
LEAST_GAP = 0.004  # the float32 noise of these logits is some 2e-5; seeds with nearer ties are passed over


def shape(hidden: int, heads: int, kv_heads: int, **fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        **fields,
    }


def rope(kind: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


def linear(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> dict[str, Any]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": kernel,
    }


GEMMA4_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
}


# name -> (architecture, weights' deviation, configuration)
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "llama_linear": (
        "LlamaForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, max_position_embeddings=64, attention_bias=True, mlp_bias=True)
        | rope("linear", factor=4.0),
    ),
    "llama_dynamic": (
        "LlamaForCausalLM",
        0.4,
        shape(36, 3, 3, max_position_embeddings=64) | rope("dynamic", factor=4.0),
    ),
    "llama_yarn": (
        "LlamaForCausalLM",
        0.4,
        shape(40, 2, 2, head_dim=24)
        | rope("yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0),
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        0.4,
        shape(40, 5, 5, num_hidden_layers=4, head_dim=8, no_rope_layer_interval=2, eos_token_id=[3, 5]),
    ),
    "smollm3_bias": (
        "SmolLM3ForCausalLM",
        0.4,
        shape(36, 6, 2, no_rope_layers=[0, 1], attention_bias=True, tie_word_embeddings=False)
        | {"use_sliding_window": True, "sliding_window": 20},
    ),
    "mistral_window": ("MistralForCausalLM", 0.4, shape(40, 5, 1, head_dim=16, sliding_window=24)),
    "mistral_full": (
        "MistralForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=10, sliding_window=None, tie_word_embeddings=True) | rope("default", 1e6),
    ),
    "ministral": (
        "MinistralForCausalLM",
        0.4,
        shape(48, 3, 1, head_dim=20, num_hidden_layers=3, sliding_window=17)
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        0.4,
        shape(42, 7, 1, tie_word_embeddings=True, eos_token_id=[7, 9]) | rope("default", 1e6),
    ),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        0.4,
        shape(40, 4, 2, use_sliding_window=True, sliding_window=21, max_window_layers=1)
        | rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, tie_word_embeddings=True) | rope("default", 1e6),
    ),
    "qwen3_bias": (
        "Qwen3ForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=10, attention_bias=True)
        | {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    ),
    "gemma": ("GemmaForCausalLM", 0.3, shape(40, 3, 1, head_dim=16)),
    "gemma2": (
        "Gemma2ForCausalLM",
        0.3,
        shape(40, 4, 2, head_dim=16, query_pre_attn_scalar=20, sliding_window=19, eos_token_id=[1, 107])
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    "gemma2_untied": (
        "Gemma2ForCausalLM",
        0.3,
        shape(36, 6, 3, head_dim=10, num_hidden_layers=3, query_pre_attn_scalar=10, sliding_window=40)
        | {"tie_word_embeddings": False, "attention_bias": True, "attn_logit_softcapping": 20.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        0.3,
        shape(40, 4, 1, head_dim=16, num_hidden_layers=3, query_pre_attn_scalar=16, sliding_window=22)
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "gemma3_pattern": (
        "Gemma3ForCausalLM",
        0.3,
        shape(36, 6, 6, head_dim=10, num_hidden_layers=2, query_pre_attn_scalar=30, sliding_window=33)
        | {"sliding_window_pattern": 2, "tie_word_embeddings": False, "final_logit_softcapping": 25.0},
    ),
    "gemma4": (  # the last two layers have no keys of their own
        "Gemma4ForCausalLM",
        0.3,
        shape(40, 4, 1, head_dim=16, global_head_dim=24, num_hidden_layers=5, sliding_window=22)
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCABULARY}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
        | GEMMA4_ROPE,
    ),
    "gemma4_keys": (  # of which the values are made as well
        "Gemma4ForCausalLM",
        0.3,
        shape(36, 6, 3, head_dim=10, global_head_dim=16, num_global_key_value_heads=2, num_hidden_layers=3)
        | {"hidden_size_per_layer_input": 0, "sliding_window": 33, "attention_k_eq_v": True}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | GEMMA4_ROPE,
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        0.3,
        shape(40, 4, 2, head_dim=10, global_head_dim=16, num_global_key_value_heads=1, num_hidden_layers=3)
        | {"hidden_size_per_layer_input": 0, "sliding_window": 21, "attention_k_eq_v": True}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | GEMMA4_ROPE,
    ),
    "gemma3n": (  # the last two layers have no keys of their own; widths fit the C++ products
        "Gemma3nForCausalLM",
        0.3,
        shape(64, 4, 2, head_dim=16, intermediate_size=64, num_hidden_layers=5, sliding_window=22)
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY - 9}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
        | {"num_kv_shared_layers": 2, "laurel_rank": 32, "final_logit_softcapping": 30.0}
        | {"activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "gemma3n_streams": (  # three streams, other widths, no scale of a layer's end
        "Gemma3nForCausalLM",
        0.3,
        shape(36, 6, 3, head_dim=10, num_hidden_layers=3, sliding_window=33)
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCABULARY}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"num_kv_shared_layers": 1, "laurel_rank": 10, "altup_num_inputs": 3, "altup_correct_scale": False}
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.5], "final_logit_softcapping": 20.0}
        | {"tie_word_embeddings": False},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        0.4,
        shape(40, 5, 5, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
        | {"n_shared_experts": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7)
        | {"hidden_size": 40},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        0.4,
        shape(40, 4, 4, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
        | {"n_shared_experts": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 20}
        | {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
        | {"n_group": 1, "topk_group": 1, "attention_bias": True, "num_mtp_layers": 0}
        | {"tie_word_embeddings": True, "rope_interleave": False}
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek_v2_groups": (
        "DeepseekV2ForCausalLM",
        0.4,
        shape(36, 4, 4, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=16)
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 24}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "routed_scaling_factor": 4.0}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3_groups": (
        "DeepseekV3ForCausalLM",
        0.4,
        shape(36, 3, 3, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=16)
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 28}
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16, "n_group": 3, "topk_group": 2},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        0.4,
        shape(36, 5, 5, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)
        | {"n_shared_experts": 1, "num_hidden_layers": 2, "q_lora_rank": 20, "kv_lora_rank": 24}
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | rope("default"),
    ),
    "phi3_long": (
        "Phi3ForCausalLM",
        0.4,
        shape(64, 4, 2, partial_rotary_factor=0.75, original_max_position_embeddings=64)
        | {"tie_word_embeddings": True}
        | rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
        ),
    ),
    "phi3_short": (
        "Phi3ForCausalLM",
        0.4,
        shape(36, 3, 1, sliding_window=26, max_position_embeddings=512)
        | {"original_max_position_embeddings": 256}
        | rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
        ),
    ),
    "olmo2": ("Olmo2ForCausalLM", 0.4, shape(40, 5, 5) | rope("default", 5e5)),
    "olmo2_grouped": (
        "Olmo2ForCausalLM",
        0.9,
        shape(36, 6, 2, attention_bias=True, tie_word_embeddings=True),
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        0.4,
        shape(40, 5, 1, num_hidden_layers=4, sliding_window=18)
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
                | {"original_max_position_embeddings": 64},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        0.4,
        shape(40, 5, 1, tie_word_embeddings=True, attention_multiplier=0.2, residual_multiplier=0.5)
        | {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "granite_bias": (
        "GraniteForCausalLM",
        0.4,
        shape(36, 6, 3, attention_bias=True, mlp_bias=True, attention_multiplier=0.3)
        | {"residual_multiplier": 0.7, "embedding_multiplier": 1.5},
    ),
    "cohere": ("CohereForCausalLM", 0.4, shape(40, 5, 1, logit_scale=0.5)),
    "cohere_bias": (
        "CohereForCausalLM",
        0.4,
        shape(36, 6, 3, attention_bias=True, tie_word_embeddings=False, logit_scale=1.5),
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        0.4,
        shape(40, 5, 5, num_hidden_layers=3, sliding_window=23, logit_scale=0.7)
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "seed_oss": ("SeedOssForCausalLM", 0.4, shape(40, 5, 1, head_dim=16)),
    "ernie4_5": ("Ernie4_5ForCausalLM", 0.4, shape(36, 6, 2, head_dim=10, use_bias=True)),
    "helium": ("HeliumForCausalLM", 0.4, shape(40, 5, 5, head_dim=8)),
    "exaone4": (
        "Exaone4ForCausalLM",
        0.4,
        shape(40, 4, 2, head_dim=16, num_hidden_layers=3, sliding_window=21, sliding_window_pattern=2),
    ),
    "exaone4_full": (
        "Exaone4ForCausalLM",
        0.4,
        shape(36, 6, 6, sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "glm": ("GlmForCausalLM", 0.4, shape(40, 5, 1, head_dim=16, attention_bias=True, eos_token_id=[7, 9])),
    "glm4": ("Glm4ForCausalLM", 0.4, shape(36, 6, 2, head_dim=12, attention_bias=False, eos_token_id=3)),
    "mixtral": (
        "MixtralForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, num_local_experts=5, num_experts_per_tok=2),
    ),
    "mixtral_window": (
        "MixtralForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=10, num_local_experts=4, num_experts_per_tok=3, sliding_window=21)
        | {"tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
        | {"norm_topk_prob": True, "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen3_moe_bias": (
        "Qwen3MoeForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=10, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
        | {"attention_bias": True, "tie_word_embeddings": True, "mlp_only_layers": [1]},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        0.3,
        shape(40, 5, 1, sliding_window=19, tie_word_embeddings=False) | rope("default", 1e4),
    ),
    "phi": (
        "PhiForCausalLM",
        0.4,
        shape(40, 5, 1) | rope("default", 1e4, partial_rotary_factor=0.5),
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", 0.4, shape(40, 5, 1, head_dim=16, eos_token_id=[7, 9])),
    "hunyuan_alpha": (
        "HunYuanDenseV1ForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=10, tie_word_embeddings=True, attention_bias=True)
        | rope("dynamic", alpha=1000.0, factor=1.0),
    ),
    "stablelm": (
        "StableLmForCausalLM",
        0.4,
        shape(40, 5, 1, use_qkv_bias=True) | rope("default", partial_rotary_factor=0.25),
    ),
    "stablelm_parallel": (
        "StableLmForCausalLM",
        0.4,
        shape(48, 6, 3, use_parallel_residual=True, tie_word_embeddings=True)
        | rope("default", partial_rotary_factor=0.5),
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16)
        | rope(
            "yarn",
            1e4,
            factor=4.0,
            original_max_position_embeddings=20,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
        | {"n_shared_experts": 2, "num_hidden_layers": 3, "attention_bias": True, "pad_token_id": None}
        | {"routed_scaling_factor": 1.5, "use_qk_norm": True}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=19)
        | {"swiglu_limit": 1.5}
        | rope("yarn", 150000.0, factor=8.0, original_max_position_embeddings=32, truncate=False),
    ),
    "gpt_oss_mxfp4": (
        "GptOssForCausalLM",
        0.3,
        shape(64, 6, 2, head_dim=20, num_local_experts=3, num_experts_per_tok=2, sliding_window=26)
        | {"intermediate_size": 32, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | rope("yarn", 150000.0, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        0.4,
        shape(40, 5, 1, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
        | {"shared_expert_intermediate_size": 20, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | linear(3, 6, 12, 20, 4),
    ),
    "qwen3_next_dense": (
        "Qwen3NextForCausalLM",
        0.4,
        shape(36, 6, 3, head_dim=20, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=20)
        | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True}
        | linear(2, 2, 16, 8, 3)
        | rope("default", 1e6, partial_rotary_factor=0.5),
    ),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        0.3,
        shape(
            40,
            5,
            1,
            head_dim=16,
            num_hidden_layers=3,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            **linear(2, 6, 16, 12, 4),
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        0.4,
        shape(36, 6, 2, head_dim=24, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20)
        | {"shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "linear_attention"]}
        | linear(3, 3, 8, 16, 4),
    ),
}


def beside(vision: str, text: dict[str, Any]) -> dict[str, Any]:
    """A decoder within a model that also takes pictures, whose vision part is as small as can be."""
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    seeing = {"model_type": vision, "image_size": 16, "patch_size": 8, "head_dim": 8, **size}
    return {"text_config": {"vocab_size": VOCABULARY, **text}, "vision_config": seeing}


def tower(hidden: int, intermediate: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}


def soft_tower(hidden: int, intermediate: int, heads: int, head_dim: int) -> dict[str, Any]:
    """A tower of Gemma 4."""
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": heads, "head_dim": head_dim, "patch_size": 2}
    return {**sizes, "position_embedding_size": 216, **tower(hidden, intermediate, heads)}


def sighted(text: dict[str, Any], scale: int, **vision: Any) -> dict[str, Any]:
    """A decoder with a tower and a connector."""
    return {
        "text_config": {"model_type": "llama", "vocab_size": VOCABULARY, "pad_token_id": None, **text},
        "vision_config": {"num_hidden_layers": 2, **vision},
        "scale_factor": scale,
        "image_token_id": VOCABULARY - 1,
    }


IMAGE_IDS = {
    "image_token_id": VOCABULARY - 2,
    "video_token_id": VOCABULARY - 1,
    "vision_start_token_id": VOCABULARY - 4,
    "vision_end_token_id": VOCABULARY - 3,
}
CASES |= {
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        0.3,
        sighted(shape(40, 5, 1, head_dim=16), 2, image_size=24, patch_size=4, **tower(36, 44, 3))
        | {"tie_word_embeddings": False},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        0.3,
        sighted(shape(36, 6, 2), 3, image_size=20, patch_size=3, **tower(40, 56, 5)),
    ),
    "gemma3_vision": (  # a picture is longer than a window
        "Gemma3ForConditionalGeneration",
        0.3,
        {
            "text_config": {"vocab_size": VOCABULARY, **CASES["gemma3"][2]},
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 40, "patch_size": 4}
            | {"num_hidden_layers": 2, "vision_use_head": False, **tower(36, 44, 3)},
            "mm_tokens_per_image": 25,
            "image_token_index": VOCABULARY - 1,
        },
    ),
    "gemma4_vision": (
        "Gemma4ForConditionalGeneration",
        0.3,
        {
            "text_config": {"vocab_size": VOCABULARY, **CASES["gemma4"][2]},
            "vision_config": {**soft_tower(36, 44, 3, 8), "use_clipped_linears": True},
            "audio_config": None,
        },
    ),
    "gemma4_vision_windows": (  # a picture is longer than a window
        "Gemma4ForConditionalGeneration",
        0.3,
        {
            "text_config": {"vocab_size": VOCABULARY, **CASES["gemma4_keys"][2]}
            | {"use_bidirectional_attention": "vision", "sliding_window": 21},
            "vision_config": {**soft_tower(32, 20, 2, 20), "standardize": True},
            "audio_config": None,
        },
    ),
    "gemma3n_vision": (  # pictures and sound are not read; `within_vision` makes the files
        "Gemma3nForCausalLM",
        0.3,
        CASES["gemma3n_streams"][2] | {"tie_word_embeddings": True, "altup_correct_scale": True},
    ),
    "mistral3_vision": (
        "Mistral3ForConditionalGeneration",
        0.4,
        beside("pixtral", {"model_type": "mistral", **CASES["mistral_full"][2], "tie_word_embeddings": False})
        | {"tie_word_embeddings": False},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        0.35,
        {
            "text_config": shape(40, 5, 1, head_dim=16, num_hidden_layers=3, vocab_size=VOCABULARY)
            | rope("default", 1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
            "vision_config": {"depth": 3, "hidden_size": 40, "intermediate_size": 44, "num_heads": 5}
            | {"out_hidden_size": 40, "patch_size": 4, "num_position_embeddings": 36}
            | {"deepstack_visual_indexes": [0, 2]},
            **IMAGE_IDS,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        0.35,
        {
            "text_config": shape(40, 5, 1, head_dim=16, num_hidden_layers=3, vocab_size=VOCABULARY)
            | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
            | {"mlp_only_layers": [1], "tie_word_embeddings": False}
            | rope("default", 1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
            "vision_config": {"depth": 2, "hidden_size": 24, "intermediate_size": 20, "num_heads": 3}
            | {"out_hidden_size": 40, "patch_size": 4, "num_position_embeddings": 16}
            | {"deepstack_visual_indexes": [1]},
            **IMAGE_IDS,
        },
    ),
    "qwen3_5_vision": (
        "Qwen3_5ForConditionalGeneration",
        0.4,
        {
            "text_config": CASES["qwen3_5"][2]
            | {"vocab_size": VOCABULARY}
            | rope(
                "default", 1e6, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
            ),
            "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
            | {"out_hidden_size": 40, "patch_size": 4, "num_position_embeddings": 4},
            **IMAGE_IDS,
        },
    ),
    "qwen3_5_moe_vision": (
        "Qwen3_5MoeForConditionalGeneration",
        0.4,
        {
            "text_config": CASES["qwen3_5_moe"][2]
            | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
            | rope(
                "default", 1e6, partial_rotary_factor=0.5, mrope_section=[2, 2, 2], mrope_interleaved=True
            ),
            "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
            | {"out_hidden_size": 36, "patch_size": 4, "num_position_embeddings": 4},
            **IMAGE_IDS,
        },
    ),
}

# Text turns by sections of angles one after the other, and towers have other norms and positions.
_SECTIONS = rope("default", 1e4, mrope_section=[2, 3, 3])
CASES |= {
    "paddleocr_vl": (
        "PaddleOCRVLForConditionalGeneration",
        0.35,
        {
            "text_config": shape(40, 5, 1, head_dim=16, num_hidden_layers=3, vocab_size=VOCABULARY)
            | {"tie_word_embeddings": False, "pad_token_id": None, **_SECTIONS},
            "vision_config": {"image_size": 24, "patch_size": 4, "num_hidden_layers": 2, **tower(40, 44, 5)},
            "tie_word_embeddings": False,
            **IMAGE_IDS,
        },
    ),
    "glm_ocr": (
        "GlmOcrForConditionalGeneration",
        0.35,
        {
            "text_config": shape(40, 4, 2, head_dim=16, vocab_size=VOCABULARY, **_SECTIONS),
            "vision_config": {"depth": 2, "hidden_size": 40, "intermediate_size": 44, "num_heads": 5}
            | {"out_hidden_size": 40, "image_size": 24, "patch_size": 4},
            "image_token_id": VOCABULARY - 2,
            "video_token_id": VOCABULARY - 1,
            "image_start_token_id": VOCABULARY - 4,
            "image_end_token_id": VOCABULARY - 3,
        },
    ),
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        0.35,
        {
            "text_config": shape(40, 4, 4, num_hidden_layers=3, vocab_size=VOCABULARY)
            | {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 1}
            | {"moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]}
            | {"pad_token_id": None, "topk_group": 1, "max_position_embeddings": 1024},
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 2,
                    "mlp_dim": 20,
                }
                | {"image_size": 128, "patch_size": 2, "output_channels": 8, "downsample_channels": [12, 24]}
                | {"global_attn_indexes": [1]},
                "encoder_config": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
                | {"num_key_value_heads": 2, "intermediate_size": 20, "vocab_size": 1},
            },
            "image_token_id": VOCABULARY - 2,
            "tie_word_embeddings": False,
        },
    ),
}

_HYBRIDS = runpy.run_path(str(Path(__file__).with_name("hybrid_cases.py")))
CASES |= _HYBRIDS["HYBRIDS"]


def main() -> None:
    for name in sys.argv[1:] or CASES:
        for seed in range(1000):
            model = random_model(name, seed)
            arrays = golden(model, seed, LEAST_GAP)
            if arrays and fewest(arrays["tokens"]) >= 8:
                break
        else:
            raise SystemExit(f"{name}: no seed without near-ties; change the case")
        directory, features = GOLDEN / name, seen(model, seed)  # before rotary frequencies become bfloat16
        model.bfloat16().save_pretrained(directory)
        if name.endswith("mxfp4"):
            quantise_files(directory, seed)
        if (published := _HYBRIDS["PUBLISHED"].get(model.config.model_type)) is not None:
            save_file(published(model), directory / "model.safetensors", metadata={"format": "pt"})
        if name == "gemma3n_vision":
            within_vision(directory, "Gemma3nForConditionalGeneration", "gemma3n")
        np.savez_compressed(directory / "golden.npz", seed=seed, **arrays, **features)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(
            f"{name}: seed {seed}, smallest gap {arrays['gaps'].min():.4f}, distinct tokens from "
            f"{fewest(arrays['tokens'])}, largest logit {np.abs(arrays['logits']).max():.1f}, {size} bytes",
            flush=True,
        )


def random_model(name: str, seed: int) -> Any:
    """A model of the case `name` in float32, its values exact in bfloat16; norms and biases are random too."""
    architecture, deviation, fields = CASES[name]
    kind = getattr(transformers, architecture)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = kind.config_class(**{"vocab_size": VOCABULARY, **ids, **fields})
    config._attn_implementation = "eager"
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    less_one = architecture.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))  # their norm weights are stored so
    less_one &= not architecture.startswith(("Gemma4", "Gemma3n"))
    shifted = architecture.startswith(("StableLm", "Starcoder2", "PhiFor"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
            shift = shifted and parameter_name.endswith("bias")  # one constant for all would drown the tokens
            if parameter_name.endswith(("router.scale", "per_expert_scale", "correct_output_scale")):
                parameter += 1
            if "norm" in parameter_name and not shift and (not less_one or "linear_attn" in parameter_name):
                parameter += 1
            if parameter_name.endswith("A_log"):
                parameter -= 3  # slow decay: what lies far behind still counts
            if (
                parameter_name
                in (
                    *("model.norm.weight", "model.language_model.norm.weight"),
                    *(
                        "model.embedding_norm.weight",
                        "model.final_layernorm.weight",
                        "backbone.norm_f.weight",
                    ),
                )
                and config.tie_word_embeddings
            ):
                # Random signs: a tied head likes the token it was just given too well.
                parameter -= 2 * torch.randint(2, parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16().float())
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_((1 + 0.2 * torch.randn(buffer.shape, generator=generator)).bfloat16().float())
            if buffer_name.endswith(
                ("e_score_correction_bias", "expert_bias")
            ):  # as large as the scores' differences
                buffer.copy_((0.2 * torch.randn(buffer.shape, generator=generator)).bfloat16().float())
            if buffer_name.endswith(("_min", "_max", "std_bias", "std_scale")):  # of the tower of Gemma 4
                shifts = {"min": -1.5, "max": 1.5, "bias": 0.0, "scale": 1.0}
                shift = shifts[buffer_name.rpartition("_")[2]]
                buffer.copy_(
                    (shift + 0.3 * torch.randn(buffer.shape, generator=generator)).bfloat16().float()
                )
        if name.endswith("mxfp4"):
            for parameter_name, (blocks, scales) in mxfp4_tensors(config, seed).items():
                dequantised = convert_moe_packed_tensors(blocks, scales).float()
                model.get_parameter(parameter_name).copy_(dequantised)
    return model


def random_mxfp4(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of a matrix of each expert `[E, rows, columns]`, as gpt-oss stores them."""
    experts, rows, columns = shape
    size = (experts, rows, columns // 32)
    blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(123, 126, size, generator=generator, dtype=torch.uint8)


def mxfp4_tensors(config: Any, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By the name of the parameter that they become."""
    generator = torch.Generator().manual_seed(seed + 1000)
    count, d, f = config.num_local_experts, config.hidden_size, config.intermediate_size
    found = {}
    for index in range(config.num_hidden_layers):
        for name, rows, columns in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
            found[f"model.layers.{index}.mlp.experts.{name}"] = random_mxfp4(generator, count, rows, columns)
    return found


def quantise_files(directory: Path, seed: int) -> None:
    """Replace the experts' matrices of a saved model by the numbers and scales that they were made of."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    for name, (blocks, scales) in mxfp4_tensors(SimpleNamespace(**config), seed).items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def within_vision(directory: Path, architecture: str, model_type: str) -> None:
    """Make a saved decoder that of a vision-language model, whose tower needs a package (timm) to be made."""
    file = directory / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): each for name, each in load_file(file).items()
    }
    others = (
        "vision_tower.timm_model.stem.weight",
        "audio_tower.norm.weight",
        "embed_vision.embedding.weight",
    )
    save_file(tensors | {f"model.{name}": torch.ones(2, 2) for name in others}, file)
    text = json.loads((directory / "config.json").read_text())
    whole = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    del text["architectures"]
    (directory / "config.json").write_text(json.dumps(whole, indent=2) + "\n")


def random_prompts(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]


@torch.inference_mode()
def golden(model: Any, seed: int, least_gap: float = 0.0) -> dict[str, np.ndarray]:
    """The arrays described above; none of them as soon as a gap is below `least_gap`."""
    prompts = random_prompts(seed)
    count = len(prompts)
    sequence = np.zeros((count, LENGTH), np.int64)
    last = np.array([len(prompt) - 1 for prompt in prompts])
    for row, prompt in enumerate(prompts):
        sequence[row, : len(prompt)] = prompt
    padded = np.where(np.arange(max(PROMPT_LENGTHS)) <= last[:, None], sequence[:, : max(PROMPT_LENGTHS)], -1)
    tokens, gaps, first = np.zeros((count, NEW_TOKENS), np.int32), [], None
    for step in range(NEW_TOKENS):
        every = model(torch.from_numpy(sequence), use_cache=False).logits.numpy()
        logits = every[np.arange(count), last + step]
        first = logits.astype(np.float32) if first is None else first
        ordered = np.sort(logits)
        gaps.append(ordered[:, -1] - ordered[:, -2])
        if gaps[-1].min() < least_gap:
            return {}
        tokens[:, step] = sequence[np.arange(count), last + step + 1] = logits.argmax(1)
    return {
        "prompts": padded.astype(np.int32),
        "tokens": tokens,
        "gaps": np.stack(gaps, axis=1).astype(np.float32),
        "logits": first,
    }


GRIDS = ((6, 10), (4, 2), (2, 12), (18, 16))  # rows and columns of patches
SOFT_GRIDS = ((15, 18), (3, 3), (3, 18), (27, 27))  # those of Gemma 4
SOFT_TOKENS = 140  # of a padded picture


def patch_processor(config: Any) -> Any:
    """What cuts pictures into patches; PaddleOCR-VL reads them line by line, and the others square by square."""
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind = PaddleOCRVLImageProcessorPil if config.model_type == "paddleocr_vl" else Qwen2VLImageProcessorPil
    return kind(patch_size=config.vision_config.patch_size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


@torch.inference_mode()
def seen_patches(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Pictures of any proportions and their features."""
    draw, found = np.random.default_rng(seed), {}
    size, processor = model.config.vision_config.patch_size, patch_processor(model.config)
    for at, (rows, columns) in enumerate(GRIDS):
        tile = draw.integers(0, 256, (rows * size, columns * size, 3), dtype=np.uint8)
        given = processor(tile, do_resize=False, return_tensors="pt")
        assert given["image_grid_thw"].tolist() == [[1, rows, columns]]
        out = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
        parts = [out.pooler_output, *getattr(out, "deepstack_features", ())]
        found |= {f"tile{at}": tile, f"features{at}": torch.cat([part[0] for part in parts], 1).numpy()}
    return found


def soft_processor(config: Any) -> Any:
    """What cuts pictures into patches for Gemma 4, and adds padding."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(
        patch_size=config.vision_config.patch_size, max_soft_tokens=SOFT_TOKENS, do_resize=False
    )


@torch.inference_mode()
def seen_softly(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Pictures of any proportions and their features, by Gemma 4."""
    draw, found = np.random.default_rng(seed), {}
    size, processor = model.config.vision_config.patch_size, soft_processor(model.config)
    for at, (rows, columns) in enumerate(SOFT_GRIDS):
        tile = draw.integers(0, 256, (rows * size, columns * size, 3), dtype=np.uint8)
        given = processor(tile, return_tensors="pt")
        assert list(map(int, given["num_soft_tokens_per_image"])) == [rows * columns // 9]
        out = model.model.get_image_features(given["pixel_values"], given["image_position_ids"])
        (features,) = out.pooler_output
        found |= {f"tile{at}": tile, f"features{at}": features.numpy()}
    return found


@torch.inference_mode()
def seen_crop_and_view(model: Any, seed: int) -> dict[str, np.ndarray]:
    """A tile with a part of a picture and one with a view of it, and their features, by DeepSeek-OCR-2."""
    draw, size = np.random.default_rng(seed), model.config.vision_config.sam_config.patch_size
    tiles = [draw.integers(0, 256, (side * size, side * size, 3), dtype=np.uint8) for side in (48, 64)]
    crop, view = (
        torch.from_numpy(tile.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)[None] for tile in tiles
    )
    (both,) = (each.numpy() for each in model.model.get_image_features(view, crop, [1]).pooler_output)
    return {"tile0": tiles[0], "features0": both[:144], "tile1": tiles[1], "features1": both[144:]}


@torch.inference_mode()
def seen(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Tiles and features; nothing of families whose pictures are not supported."""
    kinds = (
        "Qwen3VLPreTrainedModel",
        "Qwen3VLMoePreTrainedModel",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
    )
    if isinstance(model, tuple(getattr(transformers, kind) for kind in kinds)):
        return seen_patches(model, seed)
    if isinstance(model, transformers.Gemma4ForConditionalGeneration):
        return seen_softly(model, seed)
    if isinstance(model, transformers.DeepseekOcr2ForConditionalGeneration):
        return seen_crop_and_view(model, seed)
    kinds = ("Idefics3PreTrainedModel", "SmolVLMPreTrainedModel", "Gemma3ForConditionalGeneration")
    if not isinstance(model, tuple(getattr(transformers, kind) for kind in kinds)):
        return {}
    side = model.config.vision_config.image_size
    tiles = np.random.default_rng(seed).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    pixels = torch.from_numpy(tiles.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
    gemma = model.config.model_type == "gemma3"
    found = model.model.get_image_features(pixel_values=pixels if gemma else pixels[:, None])
    return {"tiles": tiles, "features": torch.stack(list(found.pooler_output)).numpy()}


def fewest(tokens: np.ndarray) -> int:
    """Distinct tokens of the most monotonous continuation."""
    return min(len(set(row)) for row in tokens.tolist())


if __name__ == "__main__":
    main()
