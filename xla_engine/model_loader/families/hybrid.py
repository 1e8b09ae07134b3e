"""Qwen3-Next and Qwen3.5: gated DeltaNet layers and full attention with gated output, with MLPs or experts."""

from dataclasses import replace
from typing import Any

import numpy as np

from xla_engine.graphs.config import FULL, LINEAR, DeltaForm, ModelConfig
from xla_engine.model_loader.families.experts import QWEN_EXPERTS, mlp_only_layers, routed_experts
from xla_engine.model_loader.families.family import Family, Source, Tensors, turned_rows
from xla_engine.model_loader.families.llama import ATTENTION, HEAD_NORMS, MLP, MODEL, PRE_NORMS
from xla_engine.model_loader.families.qwen import patch_tower
from xla_engine.model_loader.families.windows import layer_count
from xla_engine.model_loader.json_fields import Fields

_MOST = 2**14


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


def _by_key_head(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
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


_TENSORS: Tensors = {
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


def _flags(fields: Fields) -> dict[str, Any]:
    count = layer_count(fields)
    interval = fields.integer("full_attention_interval", high=2**12, default=4)
    types = fields.values.get("layer_types")
    if types is None:
        types = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(kind not in (FULL, LINEAR) for kind in types)
    ):
        fields.fail("layer_types", f'must be {count} times "{FULL}" or "{LINEAR}". Correct the file')
    sizes = {
        ours: fields.integer(f"linear_{theirs}", high=_MOST)
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
    sources = (fields, fields.within("rope_parameters"), fields.within("rope_scaling"))
    given = any(source is not None and source.given("partial_rotary_factor") for source in sources)
    return {} if given else {"partial_rotary_factor": 0.25}


def _with_experts(fields: Fields) -> dict[str, Any]:
    shared = fields.integer("shared_expert_intermediate_size", high=2**22)
    return {
        **_flags(fields),
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
    tensors={**_TENSORS, **MLP, "delta.projected": _by_part},
    flags=_flags,
    reads=_READS,
    defaults=_DEFAULTS,
    norm_offset=1.0,
    ignores=r"mtp\..*",
)
QWEN3_NEXT = replace(
    QWEN3_5,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    tensors={**_TENSORS, **MLP, **_EXPERTS, "delta.projected": _by_key_head},
    flags=_with_experts,
)
QWEN3_5_VISION = replace(
    QWEN3_5,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text_type=QWEN3_5.model_type,
    tensors={
        **QWEN3_5.tensors,
        "embed": ("model.language_model.embed_tokens.weight",),
        "final_norm": ("model.language_model.norm.weight",),
    },
    layer="model.language_model.layers.{index}.",
    ignores=r"(model\.visual|mtp)\..*",
    vision=patch_tower("model.visual.", taps=False),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    tensors={**_TENSORS, **_EXPERTS, "delta.projected": _by_part},
    flags=_with_experts,
    defaults={**_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 32},  # no MLP
)
