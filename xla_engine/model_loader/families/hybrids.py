"""Families whose recurrent layers are no DeltaNet: LFM2, with short convolutions beside attention."""

from dataclasses import replace
from typing import Any

from xla_engine.graphs.config import CONV, ModelConfig
from xla_engine.graphs.recurrent_forms import ConvolutionForm
from xla_engine.model_loader.families.dense import layer_count, layer_types
from xla_engine.model_loader.families.experts import each_expert, routed_experts
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.json_fields import Fields

_WIDEST = 2**22


def convolution_of(name: str) -> Sources:
    """The filters `[features, kernel]`, which transformers stores with an axis in the middle."""

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        return (Source(name=name, shape=(shape[0], 1, shape[1])),)

    return sources


_LFM2: Tensors = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.embedding_norm.weight",),
    "head": ("lm_head.weight",),
    "input_norm": ("operator_norm.weight",),
    "pre_feedforward_norm": ("ffn_norm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "q_norm": ("self_attn.q_layernorm.weight",),
    "k_norm": ("self_attn.k_layernorm.weight",),
    "output": ("self_attn.out_proj.weight",),
    "conv.projected": ("conv.in_proj.weight",),
    "conv.projected_bias": ("conv.in_proj.bias",),
    "conv.convolution": convolution_of("conv.conv.weight"),
    "conv.convolution_bias": ("conv.conv.bias",),
    "conv.output": ("conv.out_proj.weight",),
    "conv.output_bias": ("conv.out_proj.bias",),
    "gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "down": ("feed_forward.w2.weight",),
}


def _convolutions(fields: Fields) -> dict[str, Any]:
    """Attention where `layer_types` or, in older files, `full_attn_idxs` says so."""
    attends = fields.values.get("full_attn_idxs")
    if attends is not None and not isinstance(attends, list):
        fields.fail("full_attn_idxs", "must be a list of layer indices. Correct the file")
    types = layer_types(fields, CONV, lambda index: attends is not None and index not in attends)
    form = ConvolutionForm(
        features=fields.integer("hidden_size", high=_WIDEST),
        kernel=fields.integer("conv_L_cache", low=2, high=2**10),
        bias=fields.flag("conv_bias", default=False),
    )
    tied = "tie_embedding" if fields.given("tie_embedding") else "tie_word_embeddings"
    return {
        "layer_types": tuple(types),
        "convolution": form,
        "qk_norm": "head",
        "rms_norm_eps": fields.number("norm_eps", high=1.0, default=1e-5),
        "tie_word_embeddings": fields.flag(tied, default=True),
    }


def _lfm2(fields: Fields) -> dict[str, Any]:
    """The width of the MLP is adjusted, unless the file says otherwise: two thirds, times a factor, rounded up."""
    name = "block_ff_dim" if fields.given("block_ff_dim") else "intermediate_size"
    width = fields.integer(name, high=_WIDEST)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        width = int(2 * width / 3)
        if fields.given("block_ffn_dim_multiplier"):
            unit = fields.integer("block_multiple_of", high=_WIDEST)
            width = int(fields.number("block_ffn_dim_multiplier", high=1e3) * width)
            width = unit * -(-width // unit)
    return {**_convolutions(fields), "intermediate_size": width}


def _lfm2_moe(fields: Fields) -> dict[str, Any]:
    """Routers with sigmoids, and first layers without experts."""
    if not fields.flag("use_expert_bias", default=True):
        fields.fail(
            "use_expert_bias", "not supported (experts chosen without a bias). Use another checkpoint"
        )
    if fields.integer("expert_gating_func", high=2**8, default=2) != 2:  # of GGUF files; 2 is the sigmoid
        fields.fail("expert_gating_func", "not supported (experts not chosen by sigmoids). Use another file")
    experts = routed_experts(
        fields,
        "num_experts",
        "moe_intermediate_size",
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("routed_scaling_factor", high=1e6, default=1.0),
    )
    dense = fields.integer("num_dense_layers", low=0, high=2**12, default=2)
    return {
        **_convolutions(fields),
        "experts": experts,
        "mlp_only_layers": tuple(range(min(dense, layer_count(fields)))),
    }


LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    tensors=_LFM2,
    flags=_lfm2,
    reads=("layer_types",),
    defaults={
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "max_position_embeddings": 128000,
    },
    rope_theta=1e6,
)
LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    tensors={
        **_LFM2,
        "experts.router": ("feed_forward.gate.weight",),
        "experts.correction": ("feed_forward.expert_bias",),
        "experts.gate_up": each_expert(
            "feed_forward.experts.{expert}.w1.weight", "feed_forward.experts.{expert}.w3.weight"
        ),
        "experts.down": each_expert("feed_forward.experts.{expert}.w2.weight"),
    },
    flags=_lfm2_moe,
    defaults={
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "max_position_embeddings": 128000,
    },
)
