"""Configurations of published checkpoints, and how they must be read."""

from __future__ import annotations

from typing import Any

from xla_engine.model_loader.families import FAMILIES

SLIDES = "sliding_attention"

FULL = "full_attention"


def config(architecture: str, *sizes: int, **fields: Any) -> dict[str, Any]:
    """sizes: hidden, MLP, layers, query heads, key heads, vocabulary, positions."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
    family = FAMILIES[architecture]
    known = {"architectures": [architecture], "model_type": family.model_type}
    return known | dict(zip(names, sizes, strict=True)) | fields


LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

EXAONE_FACTORS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# name -> (fields, what the reader makes of them)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-2-7B": (
        config("LlamaForCausalLM", 4096, 11008, 32, 32, 32, 32000, 4096, pretraining_tp=1, rms_norm_eps=1e-5),
        {"head_dim": 128, "rope_theta": 1e4, "qkv_bias": False},
    ),
    "Mistral-7B-v0.1": (
        config("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
        {"sliding_window": 4096, "layer_types": (SLIDES,) * 32},
    ),
    "Mistral-7B-v0.3": (
        config(
            "MistralForCausalLM", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None, rope_theta=1e6
        ),
        {"sliding_window": None, "layer_types": (), "rope_theta": 1e6},
    ),
    "Qwen2.5-7B": (
        config("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064, 32768, rope_theta=1e6)
        | {
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 28,
            "rope_scaling": YARN,
        },
        {"qkv_bias": True, "output_bias": False, "sliding_window": None, "max_position_embeddings": 131072},
    ),
    "Qwen3-0.6B": (
        config("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 151936, 40960, head_dim=128, rope_theta=1000000)
        | {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
        | {"max_window_layers": 28, "tie_word_embeddings": True, "hidden_act": "silu"},
        {"qk_norm": "head", "head_dim": 128, "tie_word_embeddings": True, "qkv_bias": False},
    ),
    "SmolLM3-3B": (
        config("SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, 65536, rope_theta=5e6, pretraining_tp=2)
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False, "sliding_window": None}
        | {"layer_types": [FULL] * 36, "mlp_bias": False, "attention_bias": False},
        {"no_rope_layers": tuple(range(3, 36, 4)), "tie_word_embeddings": True},
    ),
    "gemma-2-2b": (
        config("Gemma2ForCausalLM", 2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, sliding_window=4096)
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {
            "layer_types": (SLIDES, FULL) * 13,
            "post_norm": True,
            "pre_norm": True,
            "embedding_multiplier": 48.0,
            "attention_multiplier": 1 / 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_tanh",
            "qk_norm": None,
        },
    ),
    "gemma-3-1b": (
        config("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, 262144, 32768, head_dim=256, sliding_window=512)
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
        }
        | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False},
        {
            "layer_types": ((SLIDES,) * 5 + (FULL,)) * 4 + (SLIDES,) * 2,
            "qk_norm": "head",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "attn_logit_softcapping": None,
        },
    ),
    "Phi-3-mini-4k": (
        config("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047, rope_scaling=None)
        | {"original_max_position_embeddings": 4096, "attention_bias": False},
        {"sliding_window": 2047, "layer_types": (SLIDES,) * 32, "rope_scaling": None},
    ),
    "Phi-4-mini": (
        config("Phi3ForCausalLM", 3072, 8192, 32, 24, 8, 200064, 131072, sliding_window=262144)
        | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096, "rope_scaling": LONG}
        | {"tie_word_embeddings": True},
        {"partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "tie_word_embeddings": True},
    ),
    "OLMo-2-7B": (
        config(
            "Olmo2ForCausalLM", 4096, 11008, 32, 32, 32, 100352, 4096, rope_theta=500000, rms_norm_eps=1e-6
        ),
        {"pre_norm": False, "post_norm": True, "qk_norm": "all", "rope_theta": 5e5},
    ),
    "granite-3.1-2b": (
        config("GraniteForCausalLM", 2048, 8192, 40, 32, 8, 49155, 131072, rope_theta=5e6, mlp_bias=False)
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"logits_scaling": 8.0, "tie_word_embeddings": True, "attention_bias": False},
        {
            "attention_multiplier": 1 / 64,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logit_scale": 0.125,
        },
    ),
    "Seed-OSS-36B": (
        config("SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, 524288, head_dim=128, rope_theta=1e7)
        | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6}
        | {"rope_scaling": {"rope_type": "default"}, "pretraining_tp": 1},
        {"qkv_bias": True, "output_bias": False, "head_dim": 128, "rope_theta": 1e7},
    ),
    "ERNIE-4.5-0.3B": (
        config("Ernie4_5ForCausalLM", 1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128, use_bias=False)
        | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        {"rope_interleaved": True, "qkv_bias": False, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    "helium-1-2b": (
        config("HeliumForCausalLM", 2048, 8192, 28, 16, 8, 64000, 4096, head_dim=128, rope_theta=20000.0)
        | {"rms_norm_eps": 1e-8, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        {"rope_interleaved": True, "rms_norm_eps": 1e-8, "qkv_bias": False},
    ),
    "EXAONE-4.0-32B": (
        config("Exaone4ForCausalLM", 5120, 27392, 64, 40, 8, 102400, 131072, head_dim=128, rope_theta=1000000)
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "rms_norm_eps": 1e-5}
        | {"rope_scaling": {"rope_type": "llama3", "factor": 16.0, **EXAONE_FACTORS}},
        {
            "layer_types": ((SLIDES,) * 3 + (FULL,)) * 16,
            "no_rope_layers": tuple(range(3, 64, 4)),
            "qk_norm": "head",
            "pre_norm": False,
        },
    ),
    "EXAONE-4.0-1.2B": (
        config("Exaone4ForCausalLM", 2048, 4096, 30, 32, 8, 102400, 65536, head_dim=64, rope_theta=1000000)
        | {"sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True},
        {"layer_types": (), "no_rope_layers": (), "sliding_window": None},
    ),
    "GLM-4-9B-0414": (
        config("Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552, 32768, head_dim=128, rope_theta=10000.0)
        | {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        {"rope_interleaved": True, "partial_rotary_factor": 0.5, "post_norm": True, "qkv_bias": True},
    ),
    "c4ai-command-r-v01": (
        config(
            "CohereForCausalLM", 8192, 22528, 40, 64, 64, 256000, 8192, layer_norm_eps=1e-5, rope_theta=8e6
        )
        | {"logit_scale": 0.0625, "use_qk_norm": False, "attention_bias": False},
        {
            "layer_norm": True,
            "use_parallel_residual": True,
            "rope_interleaved": True,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
}
