"""Families with latent attention: DeepSeek V2 and V3, and GLM-4.7-Flash."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import LatentForm
from xla_engine.graphs.ops.rope import natural_log
from xla_engine.model_loader.families.dense import MLP, MODEL, PRE_NORMS, layer_count
from xla_engine.model_loader.families.experts import GLM4_MOE, QWEN_EXPERTS, groups_of, routed_experts
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors, with_bias
from xla_engine.model_loader.json_fields import Fields

Array = np.ndarray[Any, Any]
_WIDEST = 2**22


def _form(config: ModelConfig) -> LatentForm:
    assert config.latent is not None
    return config.latent


def _in_halves(config: ModelConfig, before: int) -> Array:
    """The checkpoint's rows at each row of `before` rows without rotary embedding and, behind them, a rotary part."""
    pairs = np.arange(_form(config).qk_rope_head_dim)
    pairs = pairs.reshape(-1, 2).T.reshape(-1) if config.rope_interleaved else pairs
    return np.concatenate([np.arange(before), before + pairs])


def _queries(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    order = _in_halves(config, _form(config).qk_nope_head_dim)
    rows = np.arange(shape[0]).reshape(config.num_attention_heads, -1)[:, order]
    name = "self_attn.q_b_proj.weight" if _form(config).q_lora_rank else "self_attn.q_proj.weight"
    return (Source(name=name, shape=shape, order=rows.reshape(-1)),)


def _short(part: str) -> Sources:
    """The rows of the short vector and those of the shared rotary part, and their biases."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        order = _in_halves(config, _form(config).kv_lora_rank)
        return (Source(name=f"self_attn.kv_a_proj_with_mqa.{part}", shape=shape, order=order),)

    return sources


def _split(config: ModelConfig) -> tuple[tuple[int, int], Array, Array]:
    """The shape of the tensor that makes keys and values, and its rows for those of each head."""
    form, heads = _form(config), config.num_attention_heads
    shape = heads * (form.qk_nope_head_dim + form.v_head_dim), form.kv_lora_rank
    keys, values = np.split(np.arange(shape[0]).reshape(heads, -1), [form.qk_nope_head_dim], axis=1)
    return shape, keys, values


_MAKES = "self_attn.kv_b_proj.weight"


def _keys(config: ModelConfig, _: tuple[int, ...]) -> tuple[Source, ...]:
    """Transposed for each head: queries are multiplied by it."""
    shape, keys, _values = _split(config)
    return tuple(Source(name=_MAKES, shape=shape, order=rows, convert=np.transpose) for rows in keys)


def _values(config: ModelConfig, _: tuple[int, ...]) -> tuple[Source, ...]:
    shape, _keys, values = _split(config)
    return (Source(name=_MAKES, shape=shape, order=values.reshape(-1)),)


_TENSORS: Tensors = {
    **MODEL,
    **MLP,
    **PRE_NORMS,
    **QWEN_EXPERTS,
    **{leaf: GLM4_MOE.tensors[leaf] for leaf in ("experts.shared_gate_up", "experts.shared_down")},
    "experts.correction": GLM4_MOE.tensors["experts.correction"],
    **with_bias("q_a", "self_attn.q_a_proj"),
    "q_a_norm": ("self_attn.q_a_layernorm.weight",),
    "q_b": _queries,
    "kv_a": _short("weight"),
    "kv_a_bias": _short("bias"),
    "kv_a_norm": ("self_attn.kv_a_layernorm.weight",),
    "k_b": _keys,
    "v_b": _values,
    **with_bias("output", "self_attn.o_proj"),
}


def _latent(fields: Fields) -> dict[str, Any]:
    """Sizes of heads, and the scale of the scores: YaRN's temperature of the queries and of the keys is in it."""
    short = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank = fields.integer("q_lora_rank", high=_WIDEST) if fields.given("q_lora_rank") else 0
    form = LatentForm(q_lora_rank=rank, **{name: fields.integer(name, high=2**14) for name in short})
    width, temperature = form.query_dim, 1.0
    for rope in fields.objects("rope_parameters", "rope_scaling"):
        stretched = rope.given("mscale_all_dim") and rope.given("factor") and rope.values["factor"] > 1
        if stretched:
            share = rope.number("mscale_all_dim", high=1e3)
            temperature = 0.1 * share * natural_log(rope.number("factor", high=1e6)) + 1
    bias = fields.flag("attention_bias", default=False)
    return {
        "latent": form,
        "head_dim": form.key_dim,
        "num_key_value_heads": 1,
        "stored_parts": 1,
        "attention_multiplier": temperature * temperature / math.sqrt(width),
        "rope_interleaved": fields.flag("rope_interleave", default=True),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", default=False),
    }


def _groups(fields: Fields, methods: Mapping[str, bool]) -> dict[str, int]:
    """methods: those that are known, and whether they choose experts by group; the first is the default."""
    method = str(fields.values.get("topk_method") or next(iter(methods)))
    if method not in methods:
        fields.fail("topk_method", f"not supported. Use a checkpoint with {' or '.join(methods)}")
    return groups_of(fields) if methods[method] else {}


def mixture(fields: Fields, methods: Mapping[str, bool], **scoring: Any) -> dict[str, Any]:
    """Experts with a shared one in all but the first layers. methods: see `_groups`."""
    width = fields.integer("moe_intermediate_size", high=_WIDEST)
    experts = routed_experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        shared_expert_intermediate_size=width
        * fields.integer("n_shared_experts", low=0, high=2**16, default=1),
        shared_expert_gate=False,
        norm_topk_prob="scoring_func" in scoring and fields.flag("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", high=1e6, default=1.0),
        **scoring,
        **_groups(fields, methods),
    )
    return {"experts": experts, "mlp_only_layers": _dense_layers(fields)}


def _experts(methods: Mapping[str, bool], **scoring: Any) -> Callable[[Fields], dict[str, Any]]:
    """Latent attention, and `mixture`."""
    return lambda fields: {**_latent(fields), **mixture(fields, methods, **scoring)}


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    count, kinds = layer_count(fields), fields.values.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(min(count, fields.integer("first_k_dense_replace", low=0, high=2**12))))
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(each not in ("dense", "sparse") for each in kinds)
    ):
        fields.fail("mlp_layer_types", f'must be {count} times "dense" or "sparse". Correct the file')
    return tuple(index for index, kind in enumerate(kinds) if kind == "dense")


SOFTMAX_METHODS = {"greedy": False, "group_limited_greedy": True}  # of DeepSeek V2
_DEFAULTS = {"head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "n_group": 1, "topk_group": 1}
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    tensors=_TENSORS,
    flags=_experts(SOFTMAX_METHODS),
    reads=("attention_bias", "mlp_bias", "pretraining_tp"),  # this architecture ignores the last
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "qk_nope_head_dim": 128,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
    },
)
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    also_types=("kimi_k2",),
    tensors=_TENSORS,
    flags=_experts({"noaux_tc": True}, scoring_func="sigmoid"),
    reads=("attention_bias", "pretraining_tp"),
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "qk_nope_head_dim": 128,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    ignores=r"model\.layers\.LAYERS\..*",
)
GLM4_MOE_LITE = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    tensors=_TENSORS,
    flags=_experts({"noaux_tc": True}, scoring_func="sigmoid"),
    reads=("attention_bias", "pretraining_tp"),
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "qk_nope_head_dim": 192,
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
    ignores=r"model\.layers\.LAYERS\..*",
)
