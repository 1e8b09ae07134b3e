"""Families with Mamba-2 layers: Granite 4, Falcon-H1, Nemotron-H, and Mamba-2 itself."""

import math
from typing import Any

from xla_engine.graphs.config import FULL, MAMBA, MLP, PARALLEL
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.recurrent_forms import MambaForm
from xla_engine.model_loader.families.dense import GRANITE, TENSORS, attention_bias, layer_count
from xla_engine.model_loader.families.experts import each_expert, groups_of, routed_experts
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.families.hybrids import convolution_of
from xla_engine.model_loader.json_fields import Fields

_WIDEST = 2**22


def mamba_tensors(module: str) -> Tensors:
    """The tensors of a Mamba-2 layer. module: its name in the layer."""
    return {
        "mamba.projected": (f"{module}.in_proj.weight",),
        "mamba.projected_bias": (f"{module}.in_proj.bias",),
        "mamba.convolution": convolution_of(f"{module}.conv1d.weight"),
        "mamba.convolution_bias": (f"{module}.conv1d.bias",),
        "mamba.decay": (f"{module}.A_log",),
        "mamba.step_bias": (f"{module}.dt_bias",),
        "mamba.skip": (f"{module}.D",),
        "mamba.scale": (f"{module}.norm.weight",),
        "mamba.output": (f"{module}.out_proj.weight",),
        "mamba.output_bias": (f"{module}.out_proj.bias",),
    }


def _step_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`; infinity may be a number, a word or transformers' object."""
    limits = fields.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    except (TypeError, ValueError, KeyError):
        fields.fail("time_step_limit", "must be two numbers. Correct the file")
    if not 0 <= low <= high:
        fields.fail("time_step_limit", "must be the least and the most of a step. Correct the file")
    return low, high


def mamba_form(fields: Fields, words: dict[str, str], **others: Any) -> MambaForm:
    """Sizes of the Mamba layers. words: the names of the fields for `MambaForm`'s."""
    sizes: dict[str, Any] = {ours: fields.integer(theirs, high=2**16) for ours, theirs in words.items()}
    return MambaForm(**sizes, step_limits=_step_limits(fields), **others)


def mamba_types(fields: Fields, name: str, words: dict[str, str]) -> tuple[str, ...]:
    """The type of each layer. words: ours by those of the file."""
    types = fields.values.get(name)
    if not isinstance(types, list) or any(each not in words for each in types):
        fields.fail(name, f"must be a list of: {', '.join(words)}. Use another checkpoint")
    return tuple(words[each] for each in types)


_MAMBA_OR_ATTENTION = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": FULL,
    "full_attention": FULL,
}
_JAMBA_WORDS = {  # of Granite and Falcon
    "value_heads": "mamba_n_heads",
    "value_dim": "mamba_d_head",
    "key_heads": "mamba_n_groups",
    "key_dim": "mamba_d_state",
    "kernel": "mamba_d_conv",
}


def _head_sizes(fields: Fields, inner: int) -> Fields:
    """With the size of a head, which may be "auto"."""
    if fields.values.get("mamba_d_head") in (None, "auto"):
        heads = fields.integer("mamba_n_heads", high=2**16)
        return Fields(fields.file, {**fields.values, "mamba_d_head": inner // heads})
    return fields


def _granite_hybrid(fields: Fields) -> dict[str, Any]:
    """Granite's multipliers; a shared MLP in each layer and, in most models, experts beside it; no rotation."""
    count = layer_count(fields)
    name = "layers_block_type" if fields.given("layers_block_type") else "layer_types"
    types = (MAMBA,) * count
    if fields.given(name):
        types = mamba_types(fields, name, _MAMBA_OR_ATTENTION)
    inner = fields.integer("mamba_expand", high=2**10) * fields.integer("hidden_size", high=_WIDEST)
    form = mamba_form(
        _head_sizes(fields, inner),
        _JAMBA_WORDS,
        norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        bias=fields.flag("mamba_proj_bias", default=False),
        convolution_bias=fields.flag("mamba_conv_bias", default=True),
    )
    shared = fields.integer("shared_intermediate_size", high=_WIDEST)
    experts, width = None, shared
    if fields.integer("num_local_experts", low=0, high=2**16, default=0):
        experts = routed_experts(
            fields,
            "num_local_experts",
            "intermediate_size",
            shared_expert_intermediate_size=shared,
            shared_expert_gate=False,
        )
        width = fields.integer("intermediate_size", high=_WIDEST)
    rotates = fields.values.get("position_embedding_type") == "rope"
    return {
        **GRANITE.flags(fields),
        "layer_types": types,
        "mamba": form,
        "intermediate_size": width,
        "experts": experts,
        "no_rope_layers": () if rotates else tuple(range(count)),
    }


def _stacked(name: str) -> Sources:
    """The tensor of all experts, in the leaf's form."""
    return lambda _, shape: (Source(name=name, shape=shape),)


GRANITE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    tensors={
        **TENSORS,
        **mamba_tensors("mamba"),
        "gate_up": ("shared_mlp.input_linear.weight",),
        "down": ("shared_mlp.output_linear.weight",),
        "experts.router": ("block_sparse_moe.router.layer.weight",),
        "experts.gate_up": _stacked("block_sparse_moe.input_linear.weight"),
        "experts.down": _stacked("block_sparse_moe.output_linear.weight"),
        "experts.shared_gate_up": ("shared_mlp.input_linear.weight",),
        "experts.shared_down": ("shared_mlp.output_linear.weight",),
    },
    flags=_granite_hybrid,
    reads=(*GRANITE.reads, "layer_types"),
    defaults={
        "mamba_expand": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if not fields.given(name):
        return (1.0,) * count
    found = tuple(fields.numbers(name, high=1e6))
    if len(found) != count or not all(found):
        fields.fail(name, f"must be {count} numbers other than 0. Correct the file")
    return found


def _falcon_h1(fields: Fields) -> dict[str, Any]:
    """Attention and Mamba side by side in each layer, and a dozen multipliers.

    What is multiplied before a product is multiplied behind it; factors of queries and keys become those of scores.
    """
    for name, meaning in {"projectors_bias": "output projections", "mamba_proj_bias": "Mamba's"}.items():
        if fields.flag(name, default=False):
            fields.fail(name, f"not supported (biases on {meaning}). Use a plain checkpoint")

    def factor(name: str) -> float:
        return fields.number(name, high=1e6, default=1.0)

    expanded = fields.integer("mamba_expand", high=2**10) * fields.integer("hidden_size", high=_WIDEST)
    inner = fields.integer("mamba_d_ssm", high=_WIDEST) if fields.given("mamba_d_ssm") else expanded
    before, entering = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    norm = "plain" if fields.flag("mamba_norm_before_gate", default=True) else "gated"
    form = mamba_form(
        _head_sizes(fields, inner),
        _JAMBA_WORDS,
        norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-5),
        convolution_bias=fields.flag("mamba_conv_bias", default=True),
        norm=norm if fields.flag("mamba_rms_norm", default=False) else None,
        multipliers=tuple(entering * each for each in _multipliers(fields, "ssm_multipliers", 5)),
        output_multiplier=factor("ssm_out_multiplier"),
    )
    heads = fields.integer("num_attention_heads", high=2**14)
    head = fields.integer("hidden_size", high=_WIDEST) // heads
    head = fields.integer("head_dim", high=2**14, default=head)
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    return {
        "layer_types": (PARALLEL,) * layer_count(fields),
        "mamba": form,
        "attention_multiplier": before * before * factor("key_multiplier") / math.sqrt(head),
        "attention_output_multiplier": before * factor("attention_out_multiplier"),
        "mlp_multipliers": (gate, down),
        "embedding_multiplier": factor("embedding_multiplier"),
        "logit_scale": factor("lm_head_multiplier"),
    }


FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    tensors={
        **TENSORS,
        **mamba_tensors("mamba"),
        "final_norm": ("model.final_layernorm.weight",),
        "pre_feedforward_norm": ("pre_ff_layernorm.weight",),
        "gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
        "down": ("feed_forward.down_proj.weight",),
    },
    flags=_falcon_h1,
    reads=("embedding_multiplier",),
    defaults={
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_expand": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
)


_BLOCKS: Tensors = {
    "embed": ("backbone.embeddings.weight",),
    "final_norm": ("backbone.norm_f.weight",),
    "head": ("lm_head.weight",),
    "input_norm": ("norm.weight",),
    **mamba_tensors("mixer"),
}
_EXPERTS = "moe"
_PATTERN = {"M": MAMBA, "*": FULL, "-": MLP, "E": _EXPERTS}
_NEMOTRON_TYPES = {**_MAMBA_OR_ATTENTION, "mlp": MLP, _EXPERTS: _EXPERTS}


def _nemotron_types(fields: Fields) -> tuple[str, ...]:
    """A layer is one sublayer; older files name the types by letters. Experts are a type of their own here."""
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        names: list[str] = [_PATTERN.get(letter, letter) for letter in pattern]
        name = "hybrid_override_pattern"
    else:
        name = "layers_block_type" if fields.given("layers_block_type") else "layer_types"
        given = fields.values.get(name)
        names = given if isinstance(given, list) else []
    return mamba_types(Fields(fields.file, {name: names}), name, _NEMOTRON_TYPES | {FULL: FULL})


def _nemotron_experts(fields: Fields) -> RoutedExperts:
    """Experts without a gate, chosen by sigmoids, and a shared one; in Nemotron 3 Super, between two products."""
    if fields.flag("mlp_bias", default=False):
        fields.fail("mlp_bias", "not supported (biases on experts). Use a plain checkpoint")
    if fields.integer("n_shared_experts", low=0, high=2**16, default=1) != 1:
        fields.fail("n_shared_experts", "not supported. Use a checkpoint with 1")
    latent = "moe_latent_size"
    return routed_experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        shared_expert_intermediate_size=fields.integer("moe_shared_expert_intermediate_size", high=_WIDEST),
        shared_expert_gate=False,
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("routed_scaling_factor", high=1e6, default=1.0),
        plain=True,
        moe_latent_size=fields.integer(latent, high=_WIDEST) if fields.given(latent) else 0,
        **groups_of(fields),
    )


def _nemotron_h(fields: Fields) -> dict[str, Any]:
    if fields.flag("use_bias", default=False):
        fields.fail("use_bias", "not supported (other biases). Use a plain checkpoint")
    if fields.values.get("mlp_hidden_act", "relu2") != "relu2":
        fields.fail("mlp_hidden_act", 'not supported. Use a checkpoint with "relu2"')
    types = _nemotron_types(fields)
    eps = fields.number("layer_norm_epsilon", high=1.0, default=1e-5)
    words = {
        "value_heads": "mamba_num_heads",
        "value_dim": "mamba_head_dim",
        "key_heads": "n_groups",
        "key_dim": "ssm_state_size",
        "kernel": "conv_kernel",
    }
    form = mamba_form(
        fields,
        words,
        norm_eps=eps,
        bias=fields.flag("mamba_proj_bias", default=False),
        convolution_bias=fields.flag("use_conv_bias", default=True),
    )
    return {
        **attention_bias(fields),
        "layer_types": tuple(MLP if kind == _EXPERTS else kind for kind in types),
        "experts": _nemotron_experts(fields) if _EXPERTS in types else None,
        "mlp_only_layers": tuple(at for at, kind in enumerate(types) if kind != _EXPERTS),
        "num_hidden_layers": len(types),
        "mamba": form,
        "one_sublayer": True,
        "gated_mlp": False,
        "mlp_bias": fields.flag("mlp_bias", default=False),
        "hidden_act": "relu2",
        "rms_norm_eps": eps,
        "no_rope_layers": tuple(range(len(types))),
    }


NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    tensors={
        **_BLOCKS,
        "pre_feedforward_norm": ("norm.weight",),
        "qkv": tuple(f"mixer.{part}_proj.weight" for part in "qkv"),
        "qkv_bias": tuple(f"mixer.{part}_proj.bias" for part in "qkv"),
        "output": ("mixer.o_proj.weight",),
        "output_bias": ("mixer.o_proj.bias",),
        "up": ("mixer.up_proj.weight",),
        "up_bias": ("mixer.up_proj.bias",),
        "down": ("mixer.down_proj.weight",),
        "down_bias": ("mixer.down_proj.bias",),
        "experts.router": ("mixer.gate.weight",),
        "experts.correction": ("mixer.gate.e_score_correction_bias",),
        "experts.gate_up": each_expert("mixer.experts.{expert}.up_proj.weight"),
        "experts.down": each_expert("mixer.experts.{expert}.down_proj.weight"),
        "experts.shared_up": ("mixer.shared_experts.up_proj.weight",),
        "experts.shared_down": ("mixer.shared_experts.down_proj.weight",),
        "experts.into": ("mixer.fc1_latent_proj.weight",),
        "experts.out_of": ("mixer.fc2_latent_proj.weight",),
    },
    flags=_nemotron_h,
    reads=("attention_bias", "mlp_bias", "layer_types"),
    defaults={
        "num_hidden_layers": 1,  # which newer files leave out
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "max_position_embeddings": 4096,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    layer="backbone.layers.{index}.",
    ignores=r"mtp\..*",
)


def _mamba2(fields: Fields) -> dict[str, Any]:
    """Mamba layers alone, without keys and values: the heads of attention say nothing."""
    eps = fields.number("layer_norm_epsilon", high=1.0, default=1e-5)
    words = {
        "value_heads": "num_heads",
        "value_dim": "head_dim",
        "key_heads": "n_groups",
        "key_dim": "state_size",
        "kernel": "conv_kernel",
    }
    form = mamba_form(
        fields,
        words,
        norm_eps=eps,
        bias=fields.flag("use_bias", default=False),
        convolution_bias=fields.flag("use_conv_bias", default=True),
    )
    count = layer_count(fields)
    return {
        "layer_types": (MAMBA,) * count,
        "mamba": form,
        "one_sublayer": True,
        "intermediate_size": form.inner_features,
        "head_dim": 64,
        "rms_norm_eps": eps,
        "no_rope_layers": tuple(range(count)),
    }


MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    tensors=_BLOCKS,
    flags=_mamba2,
    reads=("layer_types",),
    defaults={
        "num_attention_heads": 1,
        "intermediate_size": 1,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "conv_kernel": 4,
    },
    layer="backbone.layers.{index}.",
)
