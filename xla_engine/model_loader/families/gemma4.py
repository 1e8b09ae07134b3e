"""Gemma 4: two sizes of heads, embeddings of each layer, layers that share keys and values, and experts beside
an MLP."""

import math
from typing import Any

import numpy as np

from xla_engine.graphs.config import FULL, SLIDING, ModelConfig
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.model_loader.families.dense import (
    ATTENTION,
    FOUR_NORMS,
    HEAD_NORMS,
    LANGUAGE_MODEL,
    MLP,
    MODEL,
    all_but_each,
    layer_types,
)
from xla_engine.model_loader.families.experts import each_expert
from xla_engine.model_loader.families.family import Family, Source, Tensors, within_vision_model
from xla_engine.model_loader.json_fields import Fields

_LARGEST = 2**31 - 1
LAYER_END: Tensors = {  # of the embedding of a layer
    "end_gate": ("per_layer_input_gate.weight",),
    "end_output": ("per_layer_projection.weight",),
    "end_norm": ("post_per_layer_input_norm.weight",),
}
# Layers that attend to the keys of others have such tensors in some files, and do not use them.
UNUSED_KEYS = r".*\.(self_attn\.[kv]_(proj|norm)|attn_[kv](_norm)?)\.weight"
OTHER_SENSES = r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*|"


def layer_inputs(model: str) -> Tensors:
    """The tensors of the embeddings of each layer. model: prefix of the decoder's tensors."""
    return {
        "layer_inputs_table": (f"{model}embed_tokens_per_layer.weight",),
        "layer_inputs_projection": (f"{model}per_layer_model_projection.weight",),
        "layer_inputs_norm": (f"{model}per_layer_projection_norm.weight",),
    }


def _router_norm(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    """The norm in front of the router: its scale, divided by the root of its width."""
    factor = np.float32(1 / math.sqrt(shape[0]))
    return (
        Source(name="router.scale", shape=shape, convert=lambda block: block.astype(np.float32) * factor),
    )


_EXPERTS: Tensors = {
    **{f"experts.dense_{leaf}": MLP[leaf] for leaf in ("gate_up", "down")},
    "experts.dense_norm": ("post_feedforward_layernorm_1.weight",),
    "experts.sum_norm": ("post_feedforward_layernorm.weight",),
    "experts.routed_norm": ("post_feedforward_layernorm_2.weight",),
    "experts.routed_input_norm": ("pre_feedforward_layernorm_2.weight",),
    "experts.routed_router": ("router.proj.weight",),
    "experts.routed_router_norm": _router_norm,
    "experts.routed_factors": ("router.per_expert_scale",),
    "experts.routed_gate_up": each_expert(
        "experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"
    ),
    "experts.routed_down": each_expert("experts.{expert}.down_proj.weight"),
}
_LAYER: Tensors = {
    **_EXPERTS,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    **FOUR_NORMS,
    **LAYER_END,
    "end_scalar": ("layer_scalar",),
}


def _overrides(fields: Fields, types: list[str]) -> dict[str, Any]:
    """Sizes of heads in full-attention layers: of files by transformers 5 in an object for each layer, all alike."""
    found = fields.within("per_layer_config")
    if found is None:
        sizes: dict[str, Any] = {
            "global_head_dim": fields.integer("global_head_dim", high=2**14, default=512)
        }
        if fields.flag("attention_k_eq_v", default=False):  # others ignore it
            sizes["num_global_key_value_heads"] = _size(fields, "num_global_key_value_heads")
        return sizes
    layers = [found.within(str(index)) for index, kind in enumerate(types) if kind == FULL]
    each = {(_size(own, "head_dim"), _size(own, "num_key_value_heads")) for own in layers}
    if len(found.values) != len(layers) or len(each) != 1:
        fields.fail("per_layer_config", "must give all full-attention layers, and no others, the same sizes")
    head_dim, heads = each.pop()
    return {"global_head_dim": head_dim, "num_global_key_value_heads": heads}


def _size(fields: Fields | None, name: str) -> int | None:
    return None if fields is None or not fields.given(name) else fields.integer(name, high=2**14)


def _gemma4(fields: Fields) -> dict[str, Any]:
    types = layer_types(fields, SLIDING, all_but_each(6))
    types[-1] = FULL  # as transformers has it, whatever the file says
    if fields.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        fields.fail("use_bidirectional_attention", "not supported (attention to later tokens)")
    flags: dict[str, Any] = {}
    if fields.flag("enable_moe_block", default=False):
        flags["experts"] = RoutedExperts(
            num_experts=fields.integer("num_experts", high=2**16),
            num_experts_per_tok=fields.integer("top_k_experts", high=2**16),
            moe_intermediate_size=fields.integer("moe_intermediate_size", high=2**22),
            beside_mlp=True,
            gelu=True,
        )
    size = fields.integer("hidden_size_per_layer_input", low=0, high=2**14, default=256)
    rows = fields.integer("vocab_size_per_layer_input", high=2**24, default=262144) if size else 0
    shared = fields.integer("num_kv_shared_layers", low=0, high=2**12, default=0)
    if fields.given("final_logit_softcapping"):
        flags["final_logit_softcapping"] = fields.number("final_logit_softcapping", high=1e6)
    return {
        **flags,
        **_overrides(fields, types),
        "layer_types": tuple(types),
        "sliding_window": fields.integer("sliding_window", high=_LARGEST),
        "attention_multiplier": 1.0,
        "attention_k_eq_v": fields.flag("attention_k_eq_v", default=False),
        "qk_norm": "head",
        "value_norm": True,
        "post_norm": True,
        "layer_scalar": True,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": fields.flag("use_double_wide_mlp", default=False),
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": rows,
        "embedding_multiplier": math.sqrt(fields.integer("hidden_size", high=2**20)),
    }


GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    tensors={**MODEL, **_LAYER, **layer_inputs("model.")},
    reads=("layer_types", "sliding_window", "final_logit_softcapping", "use_bidirectional_attention"),
    flags=_gemma4,
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    activations={"gelu_pytorch_tanh": "gelu_tanh"},
    rope_theta=1e6,
    rope_local=True,
    ignores=UNUSED_KEYS,
)


def _tower(model: str) -> dict[str, tuple[str, ...]]:
    """The tensors of the tower of `graphs.vision.gemma4` by leaf. model: prefix of the names of all modules."""
    tower = f"{model}vision_tower."
    layer = f"{tower}encoder.layers.{{index}}."
    products = {
        "qkv": tuple(f"{layer}self_attn.{part}_proj" for part in "qkv"),
        "output": (f"{layer}self_attn.o_proj",),
        "gate_up": (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        "down": (f"{layer}mlp.down_proj",),
    }
    norms = {
        "norm1": "input_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "output_norm": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    }
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return {
        "patch": (f"{tower}patch_embedder.input_proj.weight",),
        "positions": (f"{tower}patch_embedder.position_embedding_table",),
        **{leaf: (f"{layer}{name}.weight",) for leaf, name in norms.items()},
        **{leaf: tuple(f"{name}.linear.weight" for name in names) for leaf, names in products.items()},
        **{
            f"{leaf}_bounds": tuple(f"{name}.{bound}" for name in names for bound in bounds)
            for leaf, names in products.items()
        },
        "shift": (f"{tower}std_bias",),
        "scale": (f"{tower}std_scale",),
        "projection": (f"{model}embed_vision.embedding_projection.weight",),
    }


# With its tower; sound is not read.
GEMMA4_VISION = within_vision_model(
    GEMMA4,
    "Gemma4ForConditionalGeneration",
    "gemma4",
    model=LANGUAGE_MODEL,
    ignores=OTHER_SENSES + GEMMA4.ignores,
    others=layer_inputs(LANGUAGE_MODEL),
    vision=_tower("model."),
)
