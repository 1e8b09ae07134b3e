"""More families of decoders without experts, made of the parts of `dense`: Seed-OSS, ERNIE 4.5, Helium, EXAONE 4,
GLM, Hunyuan, StableLM, Starcoder2 and Phi."""

from dataclasses import replace
from typing import Any

from xla_engine.graphs.config import FULL
from xla_engine.model_loader.families.dense import (
    ATTENTION,
    FUSED,
    MODEL,
    OLMO,
    TENSORS,
    all_but_each,
    attention_bias,
    layer_count,
    sliding,
)
from xla_engine.model_loader.families.family import Family, Tensors, with_bias
from xla_engine.model_loader.json_fields import Fields


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return {
        "qkv_bias": fields.flag("attention_bias", default=True),
        "output_bias": fields.flag("attention_out_bias", default=False),
        "mlp_bias": fields.flag("mlp_bias", default=False),
    }


# A Llama with flags of its own for biases.
SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    tensors=TENSORS,
    reads=("attention_bias", "mlp_bias", "pretraining_tp"),  # this architecture ignores the last
    flags=_seed_oss,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
)


def _hunyuan(fields: Fields) -> dict[str, Any]:
    if not fields.flag("use_qk_norm", default=True):
        fields.fail(
            "use_qk_norm", "not supported: transformers always has these norms. Use a checkpoint with true"
        )
    return {"qk_norm": "rotated", **attention_bias(fields)}


# A Llama whose query and key heads are normalised behind the rotation.
HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    tensors={
        **TENSORS,
        "q_norm": ("self_attn.query_layernorm.weight",),
        "k_norm": ("self_attn.key_layernorm.weight",),
    },
    reads=("attention_bias", "use_qk_norm"),
    flags=_hunyuan,
    defaults={"rms_norm_eps": 1e-5},
)


# ERNIE 4.5 and Helium are Llamas whose rotary pairs are adjacent.
def _ernie(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("use_bias", default=False)
    return {"rope_interleaved": True, "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _helium(fields: Fields) -> dict[str, Any]:
    return {
        "rope_interleaved": True,
        "qkv_bias": fields.flag("attention_bias", default=False),
        "mlp_bias": fields.flag("mlp_bias", default=False),
    }


ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    tensors=TENSORS,
    flags=_ernie,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    rope_theta=500000.0,
)
HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    tensors=TENSORS,
    reads=("attention_bias", "mlp_bias"),
    flags=_helium,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "max_position_embeddings": 4096},
    rope_theta=100000.0,
)


# EXAONE 4 has OLMo's norms but for one on each query and key head; in models with windows, full layers do not rotate.
def _exaone4(fields: Fields) -> dict[str, Any]:
    def slides(index: int) -> bool:  # reads the period only if it is needed: files without windows have 0
        return all_but_each(_exaone_period(fields))(index)

    flags, count = sliding(fields, slides), layer_count(fields)
    types = flags.get("layer_types", (FULL,) * count)
    full = tuple(index for index in range(count) if types[index] == FULL)
    still = full if fields.given("sliding_window") else ()
    return {"pre_norm": False, "post_norm": True, "qk_norm": "head", "no_rope_layers": still, **flags}


def _exaone_period(fields: Fields) -> int:
    """After how many layers the pattern of windows repeats: a number, or a letter for each layer, such as "LLLG"."""
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return fields.integer("sliding_window_pattern", high=2**12, default=4)


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    tensors=OLMO,
    reads=("sliding_window", "layer_types"),
    flags=_exaone4,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
)


# GLM turns half of each head, in adjacent pairs; GLM 4 has norms before and after each sublayer.
_GLM: Tensors = TENSORS | {"gate_up": FUSED["gate_up"]}
_GLM_NORMS: Tensors = {
    "input_norm": ("input_layernorm.weight",),
    "post_attention_norm": ("post_self_attn_layernorm.weight",),
    "pre_feedforward_norm": ("post_attention_layernorm.weight",),
    "post_feedforward_norm": ("post_mlp_layernorm.weight",),
}


def _glm(fields: Fields) -> dict[str, Any]:
    return {"rope_interleaved": True, "qkv_bias": fields.flag("attention_bias", default=True)}


def _glm4(fields: Fields) -> dict[str, Any]:
    return {"post_norm": True, **_glm(fields)}


GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    tensors=_GLM,
    reads=("attention_bias", "partial_rotary_factor"),
    flags=_glm,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
    },
)
GLM4 = replace(GLM, architecture="Glm4ForCausalLM", model_type="glm4", tensors=_GLM | _GLM_NORMS, flags=_glm4)


# StableLM has LayerNorm with biases, and turns a quarter of each head.
NORMS: Tensors = {
    **with_bias("input_norm", "input_layernorm"),
    **with_bias("pre_feedforward_norm", "post_attention_layernorm"),
    **with_bias("final_norm", "model.norm"),
}


def _stablelm(fields: Fields) -> dict[str, Any]:
    if fields.flag("qk_layernorm", default=False):
        fields.fail("qk_layernorm", "not supported (a norm for each head). Use another checkpoint")
    return {
        "layer_norm": True,
        "norm_bias": True,
        "qkv_bias": fields.flag("use_qkv_bias", default=False),
        "use_parallel_residual": fields.flag("use_parallel_residual", default=False),
        "rms_norm_eps": fields.number("layer_norm_eps", high=1.0, default=1e-5),
    }


STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    tensors=TENSORS | NORMS,
    reads=("partial_rotary_factor",),
    flags=_stablelm,
    defaults={"partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
)


# Starcoder2 and Phi have StableLM's norms and an MLP without a gate.
_PLAIN: dict[str, Any] = {"layer_norm": True, "norm_bias": True, "gated_mlp": False}


def _starcoder2(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("use_bias", default=True)
    return {
        **_PLAIN,
        **sliding(fields),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "rms_norm_eps": fields.number("norm_epsilon", high=1.0, default=1e-5),
    }


def _phi(fields: Fields) -> dict[str, Any]:
    if fields.flag("qk_layernorm", default=False):
        fields.fail("qk_layernorm", "not supported (a norm for each head). Use another checkpoint")
    return {
        **_PLAIN,
        "use_parallel_residual": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "rms_norm_eps": fields.number("layer_norm_eps", high=1.0, default=1e-5),
    }


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    tensors={
        **MODEL,
        **ATTENTION,
        **NORMS,
        **with_bias("up", "mlp.c_fc"),
        **with_bias("down", "mlp.c_proj"),
    },
    reads=("sliding_window",),
    flags=_starcoder2,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    activations={"gelu_pytorch_tanh": "gelu_tanh"},
)
PHI = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    tensors={
        **MODEL,
        **ATTENTION,
        **with_bias("input_norm", "input_layernorm"),
        **with_bias("final_norm", "model.final_layernorm"),
        **with_bias("output", "self_attn.dense"),
        **with_bias("up", "mlp.fc1"),
        **with_bias("down", "mlp.fc2"),
        "head_bias": ("lm_head.bias",),
    },
    reads=("partial_rotary_factor",),
    flags=_phi,
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
)
