"""Families of encoders: those of BERT's form, and those with rotary embedding (ModernBERT, Nomic, GTE).

Encoders beside transformers' own code name the same things otherwise in their configurations. `encoder_fields` gives
them the names that the rest of the loader reads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from xla_engine.graphs.config import SLIDING, ModelConfig
from xla_engine.graphs.encoder_form import EncoderForm
from xla_engine.graphs.ops.rope import power
from xla_engine.model_loader.families.dense import layer_types
from xla_engine.model_loader.families.family import Family, Source, Tensors, with_bias
from xla_engine.model_loader.json_fields import Fields

_Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
_ACTIVATIONS: Mapping[str, _Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_LARGEST = 2**20  # positions, token types and windows

_EMBEDDINGS = "embeddings."
_EMBEDDED: Tensors = {
    "embed": (f"{_EMBEDDINGS}word_embeddings.weight",),
    "positions": (f"{_EMBEDDINGS}position_embeddings.weight",),
    "token_types": (f"{_EMBEDDINGS}token_type_embeddings.weight",),
    **with_bias("embed_norm", f"{_EMBEDDINGS}LayerNorm"),
}
_TENSORS: Tensors = {
    **_EMBEDDED,
    **with_bias("qkv", *(f"attention.self.{part}" for part in ("query", "key", "value"))),
    **with_bias("output", "attention.output.dense"),
    **with_bias("attention_norm", "attention.output.LayerNorm"),
    **with_bias("up", "intermediate.dense"),
    **with_bias("down", "output.dense"),
    **with_bias("mlp_norm", "output.LayerNorm"),
}
PREFIXES = (
    "bert.",
    "roberta.",
    "mpnet.",
    "distilbert.",
    "nomic_bert.",
    "gte.",
    "new.",
)  # of the encoder's tensors beside a head


def _bert(fields: Fields) -> dict[str, Any]:
    return _learned(fields, 0)


def _roberta(fields: Fields) -> dict[str, Any]:
    """Positions are counted from the row behind that of the padding token."""
    return _learned(fields, fields.integer("pad_token_id", low=0, high=_LARGEST, default=1) + 1)


def _learned(fields: Fields, offset: int) -> dict[str, Any]:
    """The flags of a model with learned positions, of which the first of a text has the row `offset`."""
    kind = fields.values.get("position_embedding_type")
    if kind not in (None, "absolute"):
        fields.fail("position_embedding_type", 'not supported. Use a checkpoint with "absolute" positions')
    positions = fields.integer("max_position_embeddings", low=offset + 1, high=_LARGEST, default=512)
    types = fields.integer("type_vocab_size", low=0, high=_LARGEST, default=2)
    form = EncoderForm(
        positions=positions, position_offset=offset, token_types=types, activation=_activation(fields)
    )
    return {"max_position_embeddings": positions - offset, **_flags(fields, form)}


def _flags(fields: Fields, form: EncoderForm, *, biases: bool = True) -> dict[str, Any]:
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name, default=False):
            fields.fail(name, "not supported: the model would be no encoder. Use an encoder")
    return {
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-12, high=1.0),
        "qkv_bias": biases,
        "output_bias": biases,
        "mlp_bias": biases,
        "tie_word_embeddings": True,
        "encoder": form,
    }


def _activation(fields: Fields) -> _Activation:
    return _ACTIVATIONS[str(fields.values.get("hidden_act") or "gelu")]


BERT = Family(
    architecture="BertModel",
    model_type="bert",
    tensors=_TENSORS,
    flags=_bert,
    activations=dict.fromkeys(_ACTIVATIONS, "gelu_tanh"),  # the encoder's own is in its form
    defaults={"hidden_act": "gelu"},
    ignores=r"(pooler|cls|classifier|lm_head)\..*|embeddings\.position_ids",
    layer="encoder.layer.{index}.",
)


def _like_roberta(name: str, model_type: str) -> Family:
    return replace(BERT, architecture=f"{name}Model", model_type=model_type, flags=_roberta)


# A BERT without token types, with names of its own.
_NO_TYPES = {"hidden_act": "gelu", "type_vocab_size": 0}
DISTILBERT = replace(
    BERT,
    defaults=_NO_TYPES,
    architecture="DistilBertModel",
    model_type="distilbert",
    tensors={
        **_EMBEDDED,
        **with_bias("qkv", *(f"attention.{part}_lin" for part in "qkv")),
        **with_bias("output", "attention.out_lin"),
        **with_bias("attention_norm", "sa_layer_norm"),
        **with_bias("up", "ffn.lin1"),
        **with_bias("down", "ffn.lin2"),
        **with_bias("mlp_norm", "output_layer_norm"),
    },
    ignores=r"(pre_classifier|classifier|vocab_\w+)\..*|embeddings\.position_ids",
    layer="transformer.layer.{index}.",
)


def _mpnet(fields: Fields) -> dict[str, Any]:
    """A RoBERTa without token types. A key's distance adds to its score; transformers always takes 32 buckets."""
    if fields.integer("relative_attention_num_buckets", high=_LARGEST, default=32) != _BUCKETS:
        fields.fail("relative_attention_num_buckets", f"not supported. Use a checkpoint with {_BUCKETS}")
    flags = _roberta(fields)
    return {**flags, "encoder": replace(flags["encoder"], relative_buckets=_BUCKETS)}


_BUCKETS = 32
MPNET = replace(
    BERT,
    architecture="MPNetModel",
    model_type="mpnet",
    tensors={
        **_TENSORS,
        "relative_bias": ("encoder.relative_attention_bias.weight",),
        **with_bias("qkv", *(f"attention.attn.{part}" for part in "qkv")),
        **with_bias("output", "attention.attn.o"),
        **with_bias("attention_norm", "attention.LayerNorm"),
    },
    flags=_mpnet,
    defaults=_NO_TYPES,
)


def _modernbert(fields: Fields) -> dict[str, Any]:
    """Local layers see as many tokens before as behind a token, `local_attention` and the token itself in all."""
    every = fields.integer("global_attn_every_n_layers", high=_LARGEST, default=3)
    types = layer_types(fields, SLIDING, lambda index: index % every != 0)
    window = fields.integer("local_attention", high=_LARGEST, default=128) // 2 + 1
    mlp_bias = fields.flag("mlp_bias", default=False)
    form = EncoderForm(
        positions=0,
        token_types=0,
        activation=_activation(fields),
        pre_norm=True,
        norm_bias=fields.flag("norm_bias", default=False),
        gated=True,
        up_bias=mlp_bias,
    )
    return {
        **_flags(fields, form, biases=fields.flag("attention_bias", default=False)),
        "mlp_bias": mlp_bias,
        **({"layer_types": tuple(types), "sliding_window": window} if SLIDING in types else {}),
    }


MODERNBERT = replace(
    BERT,
    architecture="ModernBertModel",
    model_type="modernbert",
    tensors={
        "embed": (f"{_EMBEDDINGS}tok_embeddings.weight",),
        **with_bias("embed_norm", f"{_EMBEDDINGS}norm"),
        **with_bias("final_norm", "final_norm"),
        **with_bias("attention_norm", "attn_norm"),
        **with_bias("qkv", "attn.Wqkv"),
        **with_bias("output", "attn.Wo"),
        **with_bias("mlp_norm", "mlp_norm"),
        **with_bias("up", "mlp.Wi"),
        **with_bias("down", "mlp.Wo"),
    },
    flags=_modernbert,
    reads=("attention_bias", "mlp_bias", "layer_types"),
    defaults={"type_vocab_size": 0, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
    | {"hidden_act": "gelu", "rope_local_base_freq": 10000.0},
    ignores=r"(head|classifier|decoder)\..*",
    layer="layers.{index}.",
    rope_theta=160000.0,
    rope_local=True,
)


def _rotary(fields: Fields, *, biases: bool, types: int) -> dict[str, Any]:
    """The flags of a BERT with rotary embedding and a gated MLP. biases: whether it has any but that of the gate."""
    form = EncoderForm(
        positions=0,
        token_types=fields.integer("type_vocab_size", low=0, high=_LARGEST, default=types),
        activation=_activation(fields),
        gated=True,
        up_bias=False,
    )
    return _flags(fields, form, biases=biases)


def _nomic(fields: Fields) -> dict[str, Any]:
    return _rotary(fields, biases=False, types=2)


def _gte(fields: Fields) -> dict[str, Any]:
    return _rotary(fields, biases=True, types=1)


NOMIC = replace(
    BERT,
    architecture="NomicBertModel",
    model_type="nomic_bert",
    tensors={
        **_EMBEDDED,
        **with_bias("embed_norm", "emb_ln"),
        "qkv": ("attn.Wqkv.weight",),
        "output": ("attn.out_proj.weight",),
        **with_bias("attention_norm", "norm1"),
        "up": ("mlp.fc12.weight", "mlp.fc11.weight"),
        "down": ("mlp.fc2.weight",),
        **with_bias("mlp_norm", "norm2"),
    },
    flags=_nomic,
    defaults={"hidden_act": "silu", "max_position_embeddings": 2048},
    layer="encoder.layers.{index}.",
    rope_theta=1000.0,
)


def _gate_last(config: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
    """The fused tensor has the rows that the gate multiplies first."""
    order = np.roll(np.arange(shape[0]), shape[0] // 2)
    return (Source(name="mlp.up_gate_proj.weight", shape=shape, order=order),)


GTE = replace(
    BERT,
    architecture="GteModel",
    model_type="gte",
    tensors={
        **_EMBEDDED,
        **with_bias("qkv", "attention.qkv_proj"),
        **with_bias("output", "attention.o_proj"),
        **with_bias("attention_norm", "attn_ln"),
        "up": _gate_last,
        **with_bias("down", "mlp.down_proj"),
        **with_bias("mlp_norm", "mlp_ln"),
    },
    flags=_gte,
    defaults={"hidden_act": "gelu", "type_vocab_size": 1, "max_position_embeddings": 8192},
    rope_theta=160000.0,
)
_NEW = replace(GTE, architecture="NewModel", model_type="new")
_ALL = (
    *(BERT, _like_roberta("Roberta", "roberta"), _like_roberta("XLMRoberta", "xlm-roberta")),
    *(_like_roberta("Camembert", "camembert"), DISTILBERT, MPNET, MODERNBERT, NOMIC, GTE, _NEW),
)
ENCODERS = {family.architecture: family for family in _ALL}

# By model type, what the files of a family call the fields of others.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "distilbert": {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    },
    "modernbert": {
        "norm_eps": "layer_norm_eps",
        "hidden_activation": "hidden_act",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    },
    "nomic_bert": {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
        "activation_function": "hidden_act",
    },
}
# What the authors' own code may compute otherwise: the values that it must have.
_PLAIN: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "distilbert": {"sinusoidal_pos_embds": (False, None)},
    "nomic_bert": {
        **dict.fromkeys(
            ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved"), (False, None)
        ),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False, None)),
        **dict.fromkeys(("moe_every_n_layers", "num_experts", "rotary_scaling_factor"), (0, None)),
        "rotary_emb_fraction": (1, None),
        "rotary_emb_scale_base": (None,),
    },
    "new": {
        **dict.fromkeys(("logn_attention_scale", "logn_attention_clip1"), (False, None)),
        "layer_norm_type": ("layer_norm", None),
        "position_embedding_type": ("rope", None),
    },
}
_PLAIN = {**_PLAIN, "gte": _PLAIN["new"]}


class ClassifierHead(NamedTuple):
    """The tensors of a sequence classifier: a layer with an activation, a norm behind it if there is one, and the
    classes."""

    layer: str
    activation: str
    classes: str
    norm: str = ""


_POOLER = ClassifierHead("pooler.dense", "tanh", "classifier")
_ROBERTA_HEAD = ClassifierHead("classifier.dense", "tanh", "classifier.out_proj")
HEADS = {
    **dict.fromkeys(("BertModel", "NomicBertModel", "GteModel", "NewModel"), _POOLER),
    **dict.fromkeys(("RobertaModel", "XLMRobertaModel", "CamembertModel", "MPNetModel"), _ROBERTA_HEAD),
    "DistilBertModel": ClassifierHead("pre_classifier", "relu", "classifier"),
    "ModernBertModel": ClassifierHead("head.dense", "gelu", "classifier", "head.norm"),
}


def encoder_of(architecture: str) -> str | None:
    """The architecture in `ENCODERS` of which a model is an encoder with a head, or none; None if of none."""
    for head in ("Model", "ForSequenceClassification", "ForMaskedLM"):
        if architecture.endswith(head) and (name := architecture.removesuffix(head) + "Model") in ENCODERS:
            return name
    return None


def encoder_fields(fields: Fields, name: str) -> Fields:
    """config.json of the encoder `name` of `ENCODERS`, with the names that the loader reads."""
    kind = ENCODERS[name].model_type
    for field, plain in _PLAIN.get(kind, {}).items():
        if fields.values.get(field) not in plain:
            fields.fail(field, f"not supported for {name}. Use a checkpoint with {plain[0]!r}")
    named = {
        ours: fields.values[theirs]
        for theirs, ours in _NAMES.get(kind, {}).items()
        if fields.given(theirs) and not fields.given(ours)
    }
    if named.get("hidden_act") == "swiglu":
        named["hidden_act"] = "silu"
    found = Fields(fields.file, {**fields.values, **named, "architectures": [name]})
    scaling = found.within("rope_scaling")
    return found if scaling is None or scaling.values.get("type") != "ntk" else _ntk(found, scaling)


def _ntk(fields: Fields, scaling: Fields) -> Fields:
    """GTE's scaling: the base times the factor, and every frequency divided by its power of 2 / head size.

    As the models' own code computes it if there is no `mixed_b` (NTKScalingRotaryEmbedding; vLLM has the same).
    """
    if scaling.given("mixed_b"):
        scaling.fail("mixed_b", "not supported. Use a checkpoint without it")
    factor = scaling.number("factor", high=1e6)
    size = fields.integer("hidden_size", high=_LARGEST) // fields.integer(
        "num_attention_heads", high=_LARGEST
    )
    divisors = [power(factor, 2 / size)] * (size // 2)
    longest = fields.integer("max_position_embeddings", high=2**31 - 1, default=8192)
    rope = {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }
    theta = fields.number("rope_theta", high=1e15, default=10000.0) * factor
    return Fields(fields.file, {**fields.values, "rope_theta": theta, "rope_scaling": rope})
