"""Mixtral and Qwen3-MoE: routed experts in separate tensors."""

from typing import Any

from xla_engine.graphs.config import ModelConfig, RoutedExperts
from xla_engine.model_loader.families.family import Family, Source, Sources, Tensors
from xla_engine.model_loader.families.llama import ATTENTION, HEAD_NORMS, MLP, MODEL, PRE_NORMS
from xla_engine.model_loader.families.windows import every, layer_count, sliding
from xla_engine.model_loader.json_fields import Fields

_MOST = 2**16  # experts
_WIDEST = 2**22


def each_expert(*names: str) -> Sources:
    """Sources that stack the tensors `names` (which contain `{expert}`) of all experts into `[E, rows, columns]`."""

    def sources(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        experts, rows, columns = shape
        return tuple(
            Source(name=name.format(expert=expert), shape=(rows // len(names), columns))
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
    return {"experts": experts, **sliding(fields, every)}


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
    bias = fields.flag("attention_bias", default=False)
    return {
        "experts": routed_experts(fields, count, "moe_intermediate_size", norm_topk_prob=renormalised),
        "mlp_only_layers": mlp_only_layers(fields),
        "qk_norm": "head",
        "qkv_bias": bias,
        "output_bias": bias,
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
    tensors={**MODEL, **ATTENTION, **MLP, **PRE_NORMS, **HEAD_NORMS, **QWEN_EXPERTS},
    flags=_qwen3_moe,
    reads=("attention_bias", "use_sliding_window", "sliding_window"),
    defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768},
)
