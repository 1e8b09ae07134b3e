"""Families with experts or recurrent layers: Mixtral, Qwen3-MoE, gpt-oss, and the hybrids Qwen3-Next and Qwen3.5."""

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from xla_engine.graphs.config import LINEAR, ModelConfig
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.families.dense import (
    ATTENTION,
    HEAD_NORMS,
    LANGUAGE_MODEL,
    MLP,
    MODEL,
    PRE_NORMS,
    TENSORS,
    attention_bias,
    layer_count,
    layer_types,
    patch_tower,
    sliding,
)
from xla_engine.model_loader.families.family import (
    Family,
    Source,
    Sources,
    Tensors,
    turned_rows,
    within_vision_model,
)
from xla_engine.model_loader.json_fields import Fields

Array = np.ndarray[Any, Any]
_MOST = 2**16  # experts
_WIDEST = 2**22


def each_expert(*names: str) -> Sources:
    """Sources that stack the tensors `names` (which contain `{expert}`) of all experts: matrices into `[E, rows,
    columns]`, vectors into `[E * rows]`."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.experts is not None
        experts, rest = config.experts.num_experts, shape[2:]
        rows = prod(shape[:2]) // experts // len(names)
        return tuple(
            Source(name=name.format(expert=expert), shape=(rows, *rest))
            for expert in range(experts)
            for name in names
        )

    return sources


def routed_experts(fields: Fields, count: str, width: str, **others: Any) -> RoutedExperts:
    """Sizes common to these families. count, width: names of the fields for the number and the width of experts."""
    return RoutedExperts(
        num_experts=fields.integer(count, high=_MOST),
        num_experts_per_tok=fields.integer("num_experts_per_tok", high=_MOST),
        moe_intermediate_size=fields.integer(width, high=_WIDEST),
        **others,
    )


def groups_of(fields: Fields) -> dict[str, int]:
    """How many groups experts stand in, and from how many of them a token takes its own."""
    return {name: fields.integer(name, high=_MOST, default=1) for name in ("n_group", "topk_group")}


def mlp_only_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without experts: those listed, and all except every `decoder_sparse_step`-th."""
    step = fields.integer("decoder_sparse_step", high=_MOST, default=1)
    named = fields.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in named):
        fields.fail("mlp_only_layers", "must be a list of layer indices. Correct the file")
    return tuple(index for index in range(layer_count(fields)) if index in named or (index + 1) % step)


QWEN_EXPERTS: Tensors = {
    "experts.router": ("mlp.gate.weight",),
    "experts.gate_up": each_expert(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "experts.down": each_expert("mlp.experts.{expert}.down_proj.weight"),
}


def _mixtral(fields: Fields) -> dict[str, Any]:
    experts = routed_experts(fields, "num_local_experts", "intermediate_size")
    return {"experts": experts, **sliding(fields)}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    old, new = ("num_experts", "num_local_experts")  # transformers 4 and 5
    if fields.given(old) and fields.given(new) and fields.values[old] != fields.values[new]:
        fields.fail(old, f"contradicts {new}. Keep the one that is right")
    count = new if fields.given(new) else old
    if fields.flag("use_sliding_window", default=False):
        fields.fail(
            "use_sliding_window", "not supported (windowed attention) for Qwen3-MoE. Use a plain checkpoint"
        )
    renormalised = fields.flag("norm_topk_prob", default=False)
    return {
        **attention_bias(fields),
        "experts": routed_experts(fields, count, "moe_intermediate_size", norm_topk_prob=renormalised),
        "mlp_only_layers": mlp_only_layers(fields),
        "qk_norm": "head",
    }


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    tensors={
        **MODEL,
        **ATTENTION,
        **PRE_NORMS,
        "experts.router": ("block_sparse_moe.gate.weight",),
        "experts.gate_up": each_expert(
            "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"
        ),
        "experts.down": each_expert("block_sparse_moe.experts.{expert}.w2.weight"),
    },
    flags=_mixtral,
    reads=("sliding_window",),
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    rope_theta=1e6,
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    tensors={**TENSORS, **HEAD_NORMS, **QWEN_EXPERTS},
    flags=_qwen3_moe,
    reads=("attention_bias", "use_sliding_window", "sliding_window"),
    defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768},
)


def _qwen3_vl_moe(fields: Fields) -> dict[str, Any]:
    """Qwen3-MoE whose experts' weights always sum to one, whatever files leave out."""
    if not fields.flag("norm_topk_prob", default=True):
        fields.fail(
            "norm_topk_prob", "not supported (weights that do not sum to one). Use a plain checkpoint"
        )
    return _qwen3_moe(Fields(fields.file, {**fields.values, "norm_topk_prob": True}))


# GLM-4-MoE has a router with sigmoids, a first layer without experts and a last one that predicts further tokens.
def _glm4_moe(fields: Fields) -> dict[str, Any]:
    shared = fields.integer("n_shared_experts", low=0, high=_MOST, default=1)
    experts = routed_experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        shared_expert_intermediate_size=shared * fields.integer("moe_intermediate_size", high=_WIDEST),
        shared_expert_gate=False,
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("routed_scaling_factor", high=1e6, default=1.0),
        **groups_of(fields),
    )
    dense = fields.integer("first_k_dense_replace", low=0, high=2**12, default=1)
    return {
        "experts": experts,
        "mlp_only_layers": tuple(range(min(dense, layer_count(fields)))),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": "head" if fields.flag("use_qk_norm", default=False) else None,
    }


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    tensors={
        **TENSORS,
        **HEAD_NORMS,
        **QWEN_EXPERTS,
        "experts.correction": ("mlp.gate.e_score_correction_bias",),
        "experts.shared_gate_up": (
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        ),
        "experts.shared_down": ("mlp.shared_experts.down_proj.weight",),
    },
    flags=_glm4_moe,
    reads=("attention_bias", "use_qk_norm", "partial_rotary_factor"),
    defaults={
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
    },
    ignores=r"model\.layers\.LAYERS\..*",
)


def apart(rows: Array) -> Array:
    """Deinterleave rows `[e, 2 F, ...]` of gate, up pairs: all gates first."""
    return np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)


def _biases(name: str, *, gated: bool) -> Sources:
    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        assert config.experts is not None
        count = config.experts.num_experts
        return (Source(name=name, shape=(count, shape[0] // count), convert=apart if gated else None),)

    return sources


def _transposed(name: str, *, gated: bool, either: bool = False) -> Sources:
    """The tensor of all experts, stored as `[experts, inputs, outputs]`.

    gated: with gates and ups in turn. either: or as `[experts, outputs, inputs]`.
    """

    def convert(block: Array) -> Array:
        rows = block.swapaxes(1, 2)
        return apart(rows) if gated else rows

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        stored = (shape[0], shape[2], shape[1])
        return (Source(name=name, shape=stored, convert=convert, converted=shape if either else None),)

    return sources


_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
QWEN3_VL_MOE = within_vision_model(
    replace(
        QWEN3_MOE,
        tensors={
            **QWEN3_MOE.tensors,
            "experts.gate_up": _transposed(_GATE_UP, gated=False, either=True),  # gates first
            "experts.down": _transposed(_DOWN, gated=False, either=True),
        },
    ),
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    model=LANGUAGE_MODEL,
    ignores=r"model\.visual\..*",
    text_type="qwen3_vl_moe_text",
    flags=_qwen3_vl_moe,
    defaults={
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 128000,
    },
    rope_theta=500000.0,
    vision=patch_tower("model.visual.", taps=True),
)


def _mxfp4(name: str, *, gated: bool) -> Sources:
    """The rows of all experts (`mxfp4.Mxfp4Matrix`)."""

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        rows = np.arange(shape[0] * shape[1]).reshape(shape[:2])
        order = apart(rows).reshape(-1) if gated else None
        return (Source(name=f"{name}_blocks", shape=(rows.size, shape[2]), order=order),)

    return sources


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    if fields.number("swiglu_alpha", high=1e6) != 1.702:
        fields.fail("swiglu_alpha", "not supported (another slope of the gate than 1.702)")
    limit = fields.number("swiglu_limit", high=1e6)
    return {
        **attention_bias(fields, default=True),
        "experts": routed_experts(
            fields, "num_local_experts", "intermediate_size", bias=True, swiglu_limit=limit
        ),
        "attention_sinks": True,
        **sliding(fields, lambda index: index % 2 == 0),
    }


# Attention sinks, alternating windows, and experts with interleaved gate and up rows, often in MXFP4.
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    tensors={
        **MODEL,
        **ATTENTION,
        **PRE_NORMS,
        "sinks": ("self_attn.sinks",),
        "experts.router": ("mlp.router.weight",),
        "experts.router_bias": ("mlp.router.bias",),
        "experts.gate_up": _transposed(_GATE_UP, gated=True),
        "experts.gate_up_bias": _biases(f"{_GATE_UP}_bias", gated=True),
        "experts.down": _transposed(_DOWN, gated=False),
        "experts.down_bias": _biases(f"{_DOWN}_bias", gated=False),
    },
    mxfp4={"experts.gate_up": _mxfp4(_GATE_UP, gated=True), "experts.down": _mxfp4(_DOWN, gated=False)},
    flags=_gpt_oss,
    reads=("attention_bias", "sliding_window", "layer_types"),
    defaults={
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    rope_theta=150000.0,
)


def _gated_qkv(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    """q_proj interleaves queries and gates by head; the leaf has all gates after the values."""
    heads, d = config.num_attention_heads, shape[1]
    rows = np.arange(2 * heads * config.head_dim).reshape(heads, 2, config.head_dim)
    keys = (config.num_key_value_heads * config.head_dim, d)
    whole = (rows.size, d)
    return (
        Source(
            name="self_attn.q_proj.weight",
            shape=whole,
            order=rows[:, 0].reshape(-1),
            turned=turned_rows(config, heads),
        ),
        Source(
            name="self_attn.k_proj.weight", shape=keys, turned=turned_rows(config, config.num_key_value_heads)
        ),
        Source(name="self_attn.v_proj.weight", shape=keys),
        Source(name="self_attn.q_proj.weight", shape=whole, order=rows[:, 1].reshape(-1)),
    )


def by_key_head(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    """Qwen3-Next's projections, which are grouped by key head."""
    form, d = config.delta, shape[1]
    assert form is not None
    values = form.value_heads // form.key_heads * form.value_dim
    sizes = (form.key_dim, form.key_dim, values, values)
    rows = np.arange(form.key_heads * sum(sizes)).reshape(form.key_heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    pairs = np.arange(2 * form.value_heads).reshape(form.key_heads, 2, -1).swapaxes(0, 1)
    return (
        Source(
            name="linear_attn.in_proj_qkvz.weight",
            shape=(rows.size, d),
            order=np.concatenate([part.reshape(-1) for part in parts]),
        ),
        Source(name="linear_attn.in_proj_ba.weight", shape=(pairs.size, d), order=pairs.reshape(-1)),
    )


def _by_part(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    """Qwen3.5's projections, which are grouped by part."""
    form, d = config.delta, shape[1]
    assert form is not None
    rows = (form.mixed_features, form.inner_features, form.value_heads, form.value_heads)
    return tuple(
        Source(name=f"linear_attn.in_proj_{part}.weight", shape=(count, d))
        for part, count in zip(("qkv", "z", "b", "a"), rows, strict=True)
    )


def _convolution(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    return (Source(name="linear_attn.conv1d.weight", shape=(shape[0], 1, shape[1])),)


# Gated DeltaNet layers and full attention with gated output, with MLPs or experts.
_HYBRID: Tensors = {
    **MODEL,
    **ATTENTION,
    **PRE_NORMS,
    **HEAD_NORMS,
    "qkv": _gated_qkv,
    "delta.convolution": _convolution,
    "delta.decay": ("linear_attn.A_log",),
    "delta.step_bias": ("linear_attn.dt_bias",),
    "delta.scale": ("linear_attn.norm.weight",),
    "delta.output": ("linear_attn.out_proj.weight",),
}
_EXPERTS: Tensors = {
    **QWEN_EXPERTS,
    "experts.shared_gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "experts.shared_down": ("mlp.shared_expert.down_proj.weight",),
    "experts.shared_gate": ("mlp.shared_expert_gate.weight",),
}


def _hybrid(fields: Fields) -> dict[str, Any]:
    interval = fields.integer("full_attention_interval", high=2**12, default=4)
    types = layer_types(fields, LINEAR, lambda index: (index + 1) % interval != 0)
    sizes: dict[str, Any] = {
        ours: fields.integer(f"linear_{theirs}", high=2**14)
        for ours, theirs in (
            ("key_heads", "num_key_heads"),
            ("value_heads", "num_value_heads"),
            ("key_dim", "key_head_dim"),
            ("value_dim", "value_head_dim"),
            ("kernel", "conv_kernel_dim"),
        )
    }
    if not fields.flag("attn_output_gate", default=True):
        fields.fail("attn_output_gate", "not supported (attention without a gate in this architecture)")
    return {
        "layer_types": tuple(types),
        "delta": DeltaForm(**sizes, norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6)),
        "attn_output_gate": True,
        "qk_norm": "head",
        **_rotary_part(fields),
    }


def _rotary_part(fields: Fields) -> dict[str, Any]:
    """By default, a quarter of each head has rotary embedding."""
    sources = (fields, *fields.objects("rope_parameters", "rope_scaling"))
    given = any(source.given("partial_rotary_factor") for source in sources)
    return {} if given else {"partial_rotary_factor": 0.25}


def _with_experts(fields: Fields) -> dict[str, Any]:
    shared = fields.integer("shared_expert_intermediate_size", high=2**22)
    return {
        **_hybrid(fields),
        "experts": routed_experts(
            fields,
            "num_experts",
            "moe_intermediate_size",
            norm_topk_prob=fields.flag("norm_topk_prob", default=True),
            shared_expert_intermediate_size=shared,
        ),
        "mlp_only_layers": mlp_only_layers(fields),
    }


_READS = ("layer_types", "partial_rotary_factor")
_DEFAULTS = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 32768,
}
QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    tensors={**_HYBRID, **MLP, "delta.projected": _by_part},
    flags=_hybrid,
    reads=_READS,
    defaults=_DEFAULTS,
    norm_offset=1.0,
    ignores=r"mtp\..*",
)
QWEN3_NEXT = replace(
    QWEN3_5,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    tensors={**_HYBRID, **MLP, **_EXPERTS, "delta.projected": by_key_head},
    flags=_with_experts,
)
QWEN3_5_VISION = within_vision_model(
    QWEN3_5,
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    model=LANGUAGE_MODEL,
    ignores=r"(model\.visual|mtp)\..*",
    vision=patch_tower("model.visual.", taps=False),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    tensors={**_HYBRID, **_EXPERTS, "delta.projected": _by_part},
    flags=_with_experts,
    defaults={**_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 32},  # no MLP
)
QWEN3_5_MOE_VISION = within_vision_model(
    QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    model=LANGUAGE_MODEL,
    ignores=r"(model\.visual|mtp)\..*",
    vision=patch_tower("model.visual.", taps=False),
)
