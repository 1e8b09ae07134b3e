"""Families of encoders: BERT, and RoBERTa with the models that share its names (XLM-RoBERTa, CamemBERT)."""

from collections.abc import Mapping
from typing import Any, Literal

from xla_engine.graphs.config import EncoderForm
from xla_engine.model_loader.families.family import Family, Tensors, with_bias
from xla_engine.model_loader.json_fields import Fields

_Activation = Literal["gelu", "gelu_tanh", "relu"]
_ACTIVATIONS: Mapping[str, _Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_LARGEST = 2**20  # positions and token types

_EMBEDDINGS = "embeddings."
_TENSORS: Tensors = {
    "embed": (f"{_EMBEDDINGS}word_embeddings.weight",),
    "positions": (f"{_EMBEDDINGS}position_embeddings.weight",),
    "token_types": (f"{_EMBEDDINGS}token_type_embeddings.weight",),
    **with_bias("embed_norm", f"{_EMBEDDINGS}LayerNorm"),
    **with_bias("qkv", *(f"attention.self.{part}" for part in ("query", "key", "value"))),
    **with_bias("output", "attention.output.dense"),
    **with_bias("attention_norm", "attention.output.LayerNorm"),
    **with_bias("up", "intermediate.dense"),
    **with_bias("down", "output.dense"),
    **with_bias("mlp_norm", "output.LayerNorm"),
}
PREFIXES = ("bert.", "roberta.")  # of the encoder's tensors beside a head


def _bert(fields: Fields) -> dict[str, Any]:
    return _flags(fields, 0)


def _roberta(fields: Fields) -> dict[str, Any]:
    """Positions are counted from the row behind that of the padding token."""
    return _flags(fields, fields.integer("pad_token_id", low=0, high=_LARGEST, default=1) + 1)


def _flags(fields: Fields, offset: int) -> dict[str, Any]:
    kind = fields.values.get("position_embedding_type")
    if kind not in (None, "absolute"):
        fields.fail("position_embedding_type", 'not supported. Use a checkpoint with "absolute" positions')
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name, default=False):
            fields.fail(name, "not supported: the model would be no encoder. Use an encoder")
    positions = fields.integer("max_position_embeddings", low=offset + 1, high=_LARGEST, default=512)
    return {
        "max_position_embeddings": positions - offset,
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-12, high=1.0),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "encoder": EncoderForm(
            positions=positions,
            position_offset=offset,
            token_types=fields.integer("type_vocab_size", high=_LARGEST, default=2),
            activation=_ACTIVATIONS[str(fields.values.get("hidden_act") or "gelu")],
        ),
    }


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
    return Family(
        architecture=f"{name}Model",
        model_type=model_type,
        tensors=_TENSORS,
        flags=_roberta,
        activations=BERT.activations,
        defaults=BERT.defaults,
        ignores=BERT.ignores,
        layer=BERT.layer,
    )


_ALL = (
    BERT,
    _like_roberta("Roberta", "roberta"),
    _like_roberta("XLMRoberta", "xlm-roberta"),
    _like_roberta("Camembert", "camembert"),
)
ENCODERS = {family.architecture: family for family in _ALL}


def encoder_of(architecture: str) -> str | None:
    """The architecture in `ENCODERS` of which a model is an encoder with a head, or none; None if of none."""
    for head in ("Model", "ForSequenceClassification", "ForMaskedLM"):
        if architecture.endswith(head) and (name := architecture.removesuffix(head) + "Model") in ENCODERS:
            return name
    return None
