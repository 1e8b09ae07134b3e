"""Configurations of this year's models as they are published, written by hand: sizes and the fields that matter."""

from __future__ import annotations

from typing import Any

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def config(architecture: str, model_type: str, *sizes: int, **fields: Any) -> dict[str, Any]:
    """sizes: hidden, MLP, layers, query heads, key heads, vocabulary, positions."""
    known = {"architectures": [architecture], "model_type": model_type}
    return known | dict(zip(_SIZES, sizes, strict=True)) | fields


def within(architecture: str, model_type: str, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A model with a vision tower. text: the decoder's configuration, of which only the type counts."""
    own = {name: value for name, value in text.items() if name != "architectures"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": own,
        "vision_config": {},
        **fields,
    }


def gemma3n(layers: int, width: int, sharing: int) -> dict[str, Any]:
    """Gemma 3n with MLPs of this width, of which the last `sharing` layers have no keys of their own."""
    text = config("", "gemma3n_text", 2048, width, layers, 8, 2, 262400, 32768, head_dim=256)
    own = {
        "intermediate_size": [width] * layers,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10),
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * (layers // 5),
        "num_kv_shared_layers": sharing,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
    }
    return within("Gemma3nForConditionalGeneration", "gemma3n", text | own, audio_config={})


OF_LAYERS = {"hidden_size_per_layer_input": 256, "sliding_window": 512, "use_bidirectional_attention": None}
BOTH_WAYS = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "attention_k_eq_v": True}
BOTH_WAYS |= {"use_bidirectional_attention": "vision"}


def soft_tower(hidden: int, intermediate: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A tower of Gemma 4."""
    sizes = dict(zip(_SIZES, (hidden, intermediate, layers, heads, heads), strict=False))
    common = {"head_dim": hidden // heads, "patch_size": 16, "pooling_kernel_size": 3}
    common |= {"position_embedding_size": 10240, "rms_norm_eps": 1e-6, "model_type": "gemma4_vision"}
    common["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    return sizes | common | {"hidden_activation": "gelu_pytorch_tanh"} | fields


SMALL_TOWER = soft_tower(768, 3072, 16, 12, use_clipped_linears=True, standardize=False)
LARGE_TOWER = soft_tower(1152, 4304, 27, 16, use_clipped_linears=False, standardize=True)


def gemma4(sizes: tuple[int, ...], tower: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """sizes: hidden, MLP, layers, query heads, key heads."""
    text = config("", "gemma4_text", *sizes, 262144, 131072, head_dim=256, global_head_dim=512)
    text |= {"final_logit_softcapping": 30.0, "pad_token_id": 0, **fields}
    return within("Gemma4ForConditionalGeneration", "gemma4", text) | {"vision_config": tower}


DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN35_MOE = config(
    "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248320, 262144, head_dim=256
) | {
    **DELTA,
    **EXPERTS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
QWEN35_MOE.pop("intermediate_size")
ENCODER = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1}
XLM = config("XLMRobertaModel", "xlm-roberta", 1024, 4096, 24, 16, 16, 250002, 8194, **ENCODER)
LLAMA = config("LlamaForCausalLM", "llama", 576, 1536, 30, 9, 3, 100352, 8192, rope_theta=100000.0)
YARN_40 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN_40 |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}

_ATTENDS = (4, 8, 12, 16, 20, 24, 27)  # layers, counted from 1
KIMI = config("KimiLinearForCausalLM", "kimi_linear", 2304, 9216, 27, 32, 32, 163840, 0) | {
    "linear_attn_config": {
        "full_attn_layers": [*_ATTENDS],
        "kda_layers": [each for each in range(1, 28) if each not in _ATTENDS],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "head_dim": 72,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
}
del KIMI["max_position_embeddings"]

# name -> configuration; those of the table of the issue about this year's models
# The decoder of DeepSeek-OCR-2, whose published file has these fields twice.
DEEPSEEK_OCR_TEXT = (
    {"hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10}
    | {"num_key_value_heads": 10, "vocab_size": 129280, "max_position_embeddings": 8192}
    | {"moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"num_experts_per_tok": 6, "topk_group": 1, "topk_method": "greedy"}
    | {"bos_token_id": 0, "eos_token_id": 1}
)
PUBLISHED_THIS_YEAR: dict[str, dict[str, Any]] = {
    "Qwen3.5-35B-A3B": within("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN35_MOE),
    "gemma-4-E2B-it": gemma4(
        (1536, 6144, 35, 8, 1), SMALL_TOWER, **OF_LAYERS, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma-4-E4B-it": gemma4((2560, 10240, 42, 8, 2), SMALL_TOWER, **OF_LAYERS, num_kv_shared_layers=18),
    "gemma-4-31B-it": gemma4(
        (5376, 21504, 60, 32, 16), LARGE_TOWER, **BOTH_WAYS, num_global_key_value_heads=4
    ),
    "gemma-4-26B-A4B-it": gemma4(
        (2816, 2112, 30, 16, 8),
        LARGE_TOWER,
        **BOTH_WAYS,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-3n-E2B-it": gemma3n(30, 8192, 10),
    "gemma-3n-E4B-it": gemma3n(35, 16384, 15),
    "all-MiniLM-L6-v2": config(
        "BertModel", "bert", 384, 1536, 6, 12, 12, 30522, 512, hidden_act="gelu", layer_norm_eps=1e-12
    ),
    "all-distilroberta-v1": config("RobertaModel", "roberta", 768, 3072, 6, 12, 12, 50265, 514, **ENCODER),
    "bge-m3": XLM,
    "bge-reranker-v2-m3": XLM
    | {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
    "all-mpnet-base-v2": config(
        "MPNetForMaskedLM", "mpnet", 768, 3072, 12, 12, 12, 30527, 514, hidden_act="gelu", layer_norm_eps=1e-5
    )
    | {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    "distilbert-base-uncased-finetuned-sst-2-english": {
        "architectures": ["DistilBertForSequenceClassification"],
        "model_type": "distilbert",
        "dim": 768,
        "hidden_dim": 3072,
        "n_layers": 6,
        "n_heads": 12,
        "vocab_size": 30522,
        "activation": "gelu",
        "max_position_embeddings": 512,
        "sinusoidal_pos_embds": False,
    },
    "nomic-embed-text-v1.5": {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_inner": 3072,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 8192,
        "vocab_size": 30528,
        "type_vocab_size": 2,
        "activation_function": "swiglu",
        "prenorm": False,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
    },
    "gte-multilingual-base": config("NewModel", "new", 768, 3072, 12, 12, 12, 250048, 8192, hidden_act="gelu")
    | {"rope_theta": 20000, "rope_scaling": {"factor": 8.0, "type": "ntk"}, "type_vocab_size": 1}
    | {"layer_norm_eps": 1e-12, "position_embedding_type": "rope", "pack_qkv": True},
    "Qwen3-Embedding-0.6B": config(
        "Qwen3ForCausalLM", "qwen3", 1024, 3072, 28, 16, 8, 151669, 32768, head_dim=128, rope_theta=1e6
    )
    | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "gte-modernbert-base": config(
        "ModernBertModel", "modernbert", 768, 1152, 22, 12, 12, 50368, 8192, hidden_activation="gelu"
    )
    | {"global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0}
    | {"local_rope_theta": 10000.0, "layer_norm_eps": 1e-5, "norm_eps": 1e-5, "norm_bias": False},
    "embeddinggemma-300m": config(
        "Gemma3TextModel", "gemma3_text", 768, 1152, 24, 3, 1, 262144, 2048, head_dim=256
    )
    | {"use_bidirectional_attention": True, "sliding_window": 512, "query_pre_attn_scalar": 256},
    "granite-4.0-h-tiny": config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", 1536, 512, 40, 12, 4, 100352, 131072
    )
    | {"layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)]}
    | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024}
    | {"residual_multiplier": 0.22, "embedding_multiplier": 12, "logits_scaling": 6}
    | {"attention_multiplier": 0.0078125, "position_embedding_type": "nope"},
    "Nemotron-3-Nano-30B-A3B": config(
        "NemotronHForCausalLM", "nemotron_h", 2688, 1856, 52, 32, 2, 131072, 262144, head_dim=128
    )
    | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
    | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True}
    | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1}
    | {"topk_group": 1, "routed_scaling_factor": 2.5, "mamba_num_heads": 64, "mamba_head_dim": 64}
    | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2, "chunk_size": 128}
    | {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_conv_bias": True, "use_bias": False}
    | {"mlp_bias": False, "attention_bias": False, "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5}
    | {"partial_rotary_factor": 1.0, "rope_theta": 10000, "sliding_window": None},
    "Nemotron-3-Super-120B-A12B": config(
        "NemotronHForCausalLM", "nemotron_h", 4096, 2688, 88, 32, 2, 131072, 262144, head_dim=128
    )
    | {
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEM"
        "EMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    }
    | {"n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22, "norm_topk_prob": True}
    | {"moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "n_group": 1}
    | {"topk_group": 1, "routed_scaling_factor": 5.0, "mamba_num_heads": 128, "mamba_head_dim": 64}
    | {"moe_latent_size": 1024, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2"},
    "Qwen3-VL-30B-A3B": within(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        config("", "qwen3_vl_moe_text", 2048, 6144, 48, 32, 4, 151936, 262144, head_dim=128, rope_theta=5e6)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        | {
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
        },
        tie_word_embeddings=False,
    )
    | {
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
        | {"out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]}
    },
    "Falcon-H1-1.5B": config("FalconH1ForCausalLM", "falcon_h1", 2048, 4096, 24, 8, 2, 65537, 131072)
    | {"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256}
    | {"mlp_multipliers": [0.7, 0.3], "ssm_multipliers": [0.3, 0.2, 0.1, 0.5, 0.4], "mamba_n_groups": 1},
    "LFM2.5-1.2B": config("Lfm2ForCausalLM", "lfm2", 2048, 12288, 16, 32, 8, 65536, 128000)
    | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "LFM2-8B-A1B": config("Lfm2MoeForCausalLM", "lfm2_moe", 2048, 7168, 24, 32, 8, 65536, 128000)
    | {"full_attn_idxs": [2, 6, 10, 14, 18, 21]},
    "DeepSeek-V2-Lite": config(
        "DeepseekV2ForCausalLM", "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840
    )
    | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
    | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    | {"rope_scaling": YARN_40},
    "DeepSeek-V2": config("DeepseekV2ForCausalLM", "deepseek_v2", 5120, 12288, 60, 128, 128, 102400, 163840)
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2}
    | {"moe_intermediate_size": 1536, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 8}
    | {"topk_group": 3, "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
    | {"norm_topk_prob": False, "routed_scaling_factor": 16.0, "rope_theta": 10000, "rope_scaling": YARN_40},
    "DeepSeek-V3": config("DeepseekV3ForCausalLM", "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 163840)
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
    | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8}
    | {"topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "ep_size": 1, "rope_theta": 10000}
    | {"rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    | {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        | {"weight_block_size": [128, 128]}
    },
    "Kimi-K2": config("DeepseekV3ForCausalLM", "kimi_k2", 7168, 18432, 61, 64, 64, 163840, 131072)
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1}
    | {"moe_intermediate_size": 2048, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1}
    | {"topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0}
    | {"rope_scaling": YARN_40 | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "GLM-4.7-Flash": config(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880, 202752
    )
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}},
    "Kimi-Linear-48B-A3B": KIMI,
    "Ministral-3-8B": within(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        config("", "ministral3", 4096, 14336, 34, 32, 8, 131072, 262144, head_dim=128)
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "SmolLM3-3B": config(
        "SmolLM3ForCausalLM", "smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, rope_theta=5e6
    ),
    "Hunyuan-7B-Instruct": config(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", 4096, 14336, 32, 32, 8, 128167, 32768
    )
    | {"head_dim": 128, "use_qk_norm": True, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    | {
        "rope_scaling": {"alpha": 1000.0, "type": "dynamic", "factor": 1.0, "beta_fast": 32}
        | {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}
    },
    "ERNIE-4.5-0.3B": config(
        "Ernie4_5ForCausalLM", "ernie4_5", 1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128
    ),
    "EXAONE-4.0-1.2B": config(
        "Exaone4ForCausalLM", "exaone4", 2048, 4096, 30, 32, 8, 102400, 65536, head_dim=64
    )
    | {"sliding_window": None, "sliding_window_pattern": None},
    "Seed-OSS-36B": config(
        "SeedOssForCausalLM", "seed_oss", 5120, 27648, 64, 80, 8, 155136, 524288, head_dim=128
    ),
    "GLM-4-9B-0414": config("Glm4ForCausalLM", "glm4", 4096, 13696, 40, 32, 2, 151552, 32768, head_dim=128)
    | {"attention_bias": False, "partial_rotary_factor": 0.5},
    "GLM-4.5-Air": config("Glm4MoeForCausalLM", "glm4_moe", 4096, 10944, 46, 96, 8, 151552, 131072)
    | {"head_dim": 128, "attention_bias": True, "n_routed_experts": 128, "n_shared_experts": 1}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    | {"use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rms_norm_eps": 1e-5}
    | {"num_nextn_predict_layers": 1, "rope_scaling": None},
    "Phi-4-mini": config("Phi3ForCausalLM", "phi3", 3072, 8192, 32, 24, 8, 200064, 131072)
    | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096, "sliding_window": 262144}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
    "Phi-4-mini-flash": config("Phi4FlashForCausalLM", "phi4flash", 2560, 10240, 32, 40, 20, 200064, 262144),
    "Olmo-Hybrid-7B": config("OlmoHybridForCausalLM", "olmo_hybrid", 3840, 11008, 32, 30, 30, 100352, 65536)
    | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 8, "linear_allow_neg_eigval": True}
    | {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96}
    | {"linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}
    | {"rope_parameters": None, "rope_theta": None},
    "granite-docling-258M": within(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        LLAMA,
        scale_factor=4,
        vision_config={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        | {"num_attention_heads": 12, "image_size": 512, "patch_size": 16, "num_channels": 3}
        | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    ),
    "GLM-OCR": within(
        "GlmOcrForConditionalGeneration",
        "glm_ocr",
        config("", "glm_ocr_text", 1536, 4608, 16, 16, 8, 59392, 131072)
        | {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "num_nextn_predict_layers": 1}
        | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": [59246, 59253]}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}
            | {"mrope_section": [16, 24, 24]}
        },
        vision_config={"model_type": "glm_ocr_vision", "hidden_size": 1024, "depth": 24, "num_heads": 16}
        | {"attention_bias": True, "intermediate_size": 4096, "hidden_act": "silu", "in_channels": 3}
        | {"image_size": 336, "patch_size": 14, "out_hidden_size": 1536, "rms_norm_eps": 1e-5}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_dropout_prob": 0.0},
    ),
    "PaddleOCR-VL": config(
        "PaddleOCRVLForConditionalGeneration", "paddleocr_vl", 1024, 3072, 18, 16, 2, 103424, 131072
    )
    | {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000, "use_bias": False}
    | {"rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}}
    | {"compression_ratio": 1.0, "use_3d_rope": True, "rope_is_neox_style": True, "sliding_window": None}
    | {"tie_word_embeddings": False, "weight_share_add_bias": True, "image_token_id": 100295}
    | {
        "vision_config": {"model_type": "paddleocr_vl", "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_hidden_layers": 27, "num_attention_heads": 16, "num_channels": 3, "image_size": 384}
        | {"patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
        | {"spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2}
    },
    "granite-for-docling-500m": within(
        "GraniteDoclingForConditionalGeneration",
        "granite_docling",
        config("", "granite_docling_text", 1024, 2048, 28, 16, 4, 133800, 32768),
    ),
    "DeepSeek-OCR-2": {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "auto_map": {"AutoModel": "modeling_deepseekocr2.DeepseekOCR2ForCausalLM"},
        "candidate_resolutions": [[1024, 1024]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": DEEPSEEK_OCR_TEXT
        | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        | {"first_k_dense_replace": 1, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0}
        | {"lm_head": True, "qk_rope_head_dim": 0, "rm_head": False, "use_mla": False, "v_head_dim": 0},
        **DEEPSEEK_OCR_TEXT,
        "projector_config": {"input_dim": 896, "n_embed": 1280, "projector_type": "linear"},
        "vision_config": {
            "image_size": 1024,
            "mlp_ratio": 3.7362,
            "model_name": "deepencoderv2",
            "model_type": "vision",
            "width": {
                "qwen2-0-5b": {"dim": 896},
                "sam_vit_b": {"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11]}
                | {"heads": 12, "layers": 12, "width": 768},
            },
        },
    },
    "DeepSeek-OCR-2-hf": within(
        "DeepseekOcr2ForConditionalGeneration",
        "deepseek_ocr2",
        DEEPSEEK_OCR_TEXT
        | {"model_type": "deepseek_ocr2_text", "mlp_layer_types": ["dense", *["sparse"] * 11]}
        | {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        image_token_id=128815,
        vision_config={
            "model_type": "deepseek_ocr2_vision",
            "sam_config": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
            | {"global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512, 896], "mlp_dim": 3072},
            "encoder_config": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
            | {"num_key_value_heads": 2, "intermediate_size": 4864, "rms_norm_eps": 1e-6}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "vocab_size": 1},
        },
    ),
    "starcoder2-3b": config(
        "Starcoder2ForCausalLM", "starcoder2", 3072, 12288, 30, 24, 2, 49152, 16384, sliding_window=4096
    )
    | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "rope_theta": 999999.4420358813}
    | {"use_bias": True, "mlp_type": "default", "norm_type": "layer_norm"},
    "phi-2": config("PhiForCausalLM", "phi", 2560, 10240, 32, 32, 32, 51200, 2048, hidden_act="gelu_new")
    | {"partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "qk_layernorm": False}
    | {"tie_word_embeddings": False},
    "stablelm-2-1_6b": config("StableLmForCausalLM", "stablelm", 2048, 5632, 24, 32, 32, 100352, 4096)
    | {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "use_qkv_bias": True, "rope_theta": 10000}
    | {"use_parallel_residual": False, "qk_layernorm": False, "tie_word_embeddings": False},
    "mamba2-2.7b": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "vocab_size": 50288,
        "expand": 2,
        "num_heads": 80,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "conv_kernel": 4,
    },
}
