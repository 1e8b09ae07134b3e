"""Families with later forms of DeltaNet: OLMo Hybrid and Kimi Linear."""

from typing import Any

from xla_engine.graphs.config import LINEAR, ModelConfig
from xla_engine.graphs.recurrent_forms import DeltaForm
from xla_engine.model_loader.families.dense import OLMO, OLMO2, all_but_each, layer_count, layer_types
from xla_engine.model_loader.families.experts import each_expert
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.families.latent import DEEPSEEK_V3
from xla_engine.model_loader.json_fields import Fields

_WIDEST = 2**14
_NORM_EPS = 1e-5  # of the output norm, whatever the other norms have


def _form(config: ModelConfig) -> DeltaForm:
    assert config.delta is not None
    return config.delta


def _projections(*names: str) -> Sources:
    """Those of queries, keys, values, gates, rates and steps. Second products may make gates and steps of theirs."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        form, d = _form(config), shape[1]
        keys, gates, steps = form.key_heads * form.key_dim, form.inner_features, form.value_heads
        if form.gate_rank:
            gates = steps = form.gate_rank
        rows = (keys, keys, form.inner_features, gates, form.value_heads, steps)
        return tuple(Source(name=name, shape=(count, d)) for name, count in zip(names, rows, strict=True))

    return sources


def _convolutions(module: str) -> Sources:
    """The filters of queries, keys and values, which the file has apart."""

    def sources(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        form = _form(config)
        keys = form.key_heads * form.key_dim
        return tuple(
            Source(name=f"{module}.{part}_conv1d.weight", shape=(rows, 1, shape[1]))
            for part, rows in (("q", keys), ("k", keys), ("v", form.inner_features))
        )

    return sources


# OLMo's attention layers have norms after each sublayer, its DeltaNet layers before.
_OLMO_HYBRID: Tensors = {
    **OLMO,
    "input_norm": ("attention_layer_norm.weight",),
    "pre_feedforward_norm": ("feedforward_layer_norm.weight",),
    "delta.projected": _projections(*(f"linear_attn.{part}_proj.weight" for part in "qkvgba")),
    "delta.convolution": _convolutions("linear_attn"),
    "delta.decay": ("linear_attn.A_log",),
    "delta.step_bias": ("linear_attn.dt_bias",),
    "delta.scale": ("linear_attn.o_norm.weight",),
    "delta.output": ("linear_attn.o_proj.weight",),
}


def _olmo_hybrid(fields: Fields) -> dict[str, Any]:
    """Every fourth layer attends; sizes of DeltaNet follow from those of attention, unless the file has them."""
    count, hidden = layer_count(fields), fields.integer("hidden_size", high=2**20)
    heads = fields.integer("num_attention_heads", high=_WIDEST)
    slow = all_but_each(4)
    types = layer_types(fields, LINEAR, lambda index: slow(index) and (count >= 4 or index + 1 < count))
    keys = fields.integer("linear_num_key_heads", high=_WIDEST, default=heads)
    key_dim = fields.integer("linear_key_head_dim", high=_WIDEST, default=int(0.75 * hidden / keys))
    form = DeltaForm(
        key_heads=keys,
        value_heads=fields.integer("linear_num_value_heads", high=_WIDEST, default=heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", high=_WIDEST, default=2 * key_dim),
        kernel=fields.integer("linear_conv_kernel_dim", low=2, high=2**10, default=4),
        norm_eps=_NORM_EPS,
        rate_factor=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        pre_norm=True,
    )
    return {
        **OLMO2.flags(fields),
        "layer_types": tuple(types),
        "delta": form,
        "no_rope_layers": tuple(range(count)) if _is_still(fields) else (),
    }


def _is_still(fields: Fields) -> bool:
    """Whether the file says by a null that there is no rotary embedding, as published models do."""
    sources = (fields, *fields.objects("rope_parameters", "rope_scaling"))
    if any(source.given("rope_theta") for source in sources):
        return False
    nulls = any("rope_theta" in source.values for source in sources)
    return nulls or ("rope_parameters" in fields.values and not fields.given("rope_parameters"))


OLMO_HYBRID = Family(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    tensors=_OLMO_HYBRID,
    flags=_olmo_hybrid,
    reads=("attention_bias", "layer_types"),
    defaults={"max_position_embeddings": 65536},
)


def _log_decays(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    return (Source(name="self_attn.A_log", shape=(1, 1, *shape, 1)),)


_EXPERTS = "block_sparse_moe.experts.{expert}."
# DeepSeek V3 in which most layers are Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692), and none rotates.
_KIMI_LINEAR: Tensors = {
    **DEEPSEEK_V3.tensors,
    "experts.router": ("block_sparse_moe.gate.weight",),
    "experts.correction": ("block_sparse_moe.gate.e_score_correction_bias",),
    "experts.gate_up": each_expert(f"{_EXPERTS}w1.weight", f"{_EXPERTS}w3.weight"),
    "experts.down": each_expert(f"{_EXPERTS}w2.weight"),
    "experts.shared_gate_up": tuple(
        f"block_sparse_moe.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    "experts.shared_down": ("block_sparse_moe.shared_experts.down_proj.weight",),
    "delta.projected": _projections(
        *(f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "g_a", "b", "f_a"))
    ),
    "delta.gate": ("self_attn.g_b_proj.weight",),
    "delta.step": ("self_attn.f_b_proj.weight",),
    "delta.convolution": _convolutions("self_attn"),
    "delta.decay": _log_decays,
    "delta.step_bias": ("self_attn.dt_bias",),
    "delta.scale": ("self_attn.o_norm.weight",),
    "delta.output": ("self_attn.o_proj.weight",),
}
_DEEPSEEK_NAMES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}


def _kimi_linear(fields: Fields) -> dict[str, Any]:
    """DeepSeek V3's flags by other names, and sizes of the recurrent layers."""
    for name, value, meaning in (
        ("mla_use_nope", True, "latent attention with rotary embedding"),
        ("moe_router_activation_func", "sigmoid", "experts not chosen by sigmoids"),
        ("moe_layer_freq", 1, "layers without experts between others"),
    ):
        if fields.given(name) and fields.values[name] != value:
            fields.fail(name, f"not supported ({meaning}). Use another checkpoint")
    given = {theirs: fields.values[ours] for ours, theirs in _DEEPSEEK_NAMES.items() if fields.given(ours)}
    known = Fields(fields.file, {**fields.values, **given})
    linear = fields.within("linear_attn_config")  # of published files
    if linear is None:
        linear = Fields(fields.file, {name: fields.values.get(f"linear_{name}") for name in _LINEAR})
    heads, width = (linear.integer(name, high=_WIDEST, default=size) for name, size in _LINEAR.items())
    form = DeltaForm(
        key_heads=heads,
        value_heads=heads,
        key_dim=width,
        value_dim=width,
        kernel=_kernel(fields, linear),
        norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-5),
        gate_rank=width,
    )
    attends = linear.values.get("full_attn_layers")  # counted from 1
    if attends is not None and not isinstance(attends, list):
        linear.fail("full_attn_layers", "must be a list of layer numbers. Correct the file")
    whole = range(5, layer_count(fields) + 1, 4) if attends is None else attends
    return {
        **DEEPSEEK_V3.flags(known),
        "layer_types": tuple(layer_types(fields, LINEAR, lambda index: index + 1 not in whole)),
        "delta": form,
        "no_rope_layers": tuple(range(layer_count(fields))),
        "max_position_embeddings": known.integer("max_position_embeddings", high=2**31 - 1, default=2**20),
    }


_LINEAR = {"num_heads": 32, "head_dim": 128}


def _kernel(fields: Fields, linear: Fields) -> int:
    for source, name in ((linear, "short_conv_kernel_size"), (fields, "linear_conv_kernel_dim")):
        if source.given(name):
            return source.integer(name, low=2, high=2**10)
    return 4


KIMI_LINEAR = Family(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    tensors=_KIMI_LINEAR,
    flags=_kimi_linear,
    reads=("attention_bias", "layer_types", "pretraining_tp"),  # this architecture ignores the last
    defaults={
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    },
    ignores=r"model\.layers\.LAYERS\..*",
)
