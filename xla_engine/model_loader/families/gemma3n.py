"""Gemma 3n: several residual streams, a low-rank product beside attention, embeddings of each layer, layers that share
keys and values, and MLPs that cut off most gates."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from xla_engine.graphs.alternating_form import AlternatingForm
from xla_engine.graphs.config import SLIDING, ModelConfig
from xla_engine.model_loader.families.dense import (
    ATTENTION,
    FOUR_NORMS,
    HEAD_NORMS,
    LANGUAGE_MODEL,
    MLP,
    MODEL,
    all_but_each,
    layer_count,
    layer_types,
)
from xla_engine.model_loader.families.family import Family, Source, Tensors, within_vision_model
from xla_engine.model_loader.families.gemma4 import LAYER_END, OTHER_SENSES, UNUSED_KEYS, layer_inputs
from xla_engine.model_loader.json_fields import Fields

_LARGEST = 2**31 - 1
_MOST_STREAMS = 16
_CUT_LAYERS, _CUT = (
    10,
    0.95,
)  # the first layers of deeper models, and the share of their gates, if no file says so
_LAYER: Tensors = {
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    **FOUR_NORMS,
    **LAYER_END,
    "altup_router": ("altup.modality_router.weight",),
    "altup_router_norm": ("altup.router_norm.weight",),
    "altup_prediction": ("altup.prediction_coefs.weight",),
    "altup_correction": ("altup.correction_coefs.weight",),
    "altup_scale": ("altup.correct_output_scale",),
    "laurel_left": ("laurel.linear_left.weight",),
    "laurel_right": ("laurel.linear_right.weight",),
    "laurel_norm": ("laurel.post_laurel_norm.weight",),
}


def _streams(model: str) -> Tensors:
    """The tensors between the embedding and the streams, and between these and the head.

    model: prefix of the decoder's tensors.
    """

    def spread(_: ModelConfig, shape: tuple[int, ...]) -> tuple[Source, ...]:
        rows, width = shape
        return tuple(
            Source(name=f"{model}altup_projections.{at}.weight", shape=(width, width))
            for at in range(rows // width)
        )

    joined = {
        f"streams_joined_{at}": (f"{model}altup_unembed_projections.{at}.weight",)
        for at in range(_MOST_STREAMS - 1)
    }
    return {"streams_spread": spread, **joined}


def _cutoffs(fields: Fields) -> tuple[float | None, ...]:
    """For each layer, how many standard deviations above the mean gates are cut off; None: none are.

    config.json gives the share of gates that are cut off if they are normally distributed; GGUF files these numbers.
    """
    count, deep = layer_count(fields), _CUT_LAYERS
    name = "activation_sparsity_scale" if fields.given("activation_sparsity_scale") else _SHARES
    found = fields.values.get(name)
    found = [_CUT * (count > deep and index < deep) for index in range(count)] if found is None else found
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(type(each) in (int, float) for each in found)
    ):
        fields.fail(name, f"must be a list of {count} numbers. Correct the file")
    if name != _SHARES:
        return tuple(None if each == -math.inf else float(each) for each in found)
    if not all(0 <= share < 1 for share in found):
        fields.fail(name, "must be shares, from 0 to less than 1. Correct the file")
    return tuple(float(np.float32(NormalDist().inv_cdf(share))) if share else None for share in found)


_SHARES = "activation_sparsity_pattern"


def _gemma3n(fields: Fields) -> dict[str, Any]:
    if fields.values.get("altup_active_idx") not in (None, 0):
        fields.fail(
            "altup_active_idx", "not supported (layers that compute another stream). Use a checkpoint with 0"
        )
    return {
        "layer_types": tuple(layer_types(fields, SLIDING, all_but_each(5))),
        "sliding_window": fields.integer("sliding_window", high=_LARGEST),
        "attention_multiplier": 1.0,
        "qk_norm": "head",
        "value_norm": True,
        "post_norm": True,
        "num_kv_shared_layers": fields.integer("num_kv_shared_layers", low=0, high=2**12),
        "hidden_size_per_layer_input": fields.integer("hidden_size_per_layer_input", high=2**14),
        "vocab_size_per_layer_input": fields.integer("vocab_size_per_layer_input", high=2**24),
        "embedding_multiplier": math.sqrt(fields.integer("hidden_size", high=2**20)),
        "final_logit_softcapping": fields.number("final_logit_softcapping", high=1e6)
        if fields.given("final_logit_softcapping")
        else None,
        "alternating": AlternatingForm(
            streams=fields.integer("altup_num_inputs", low=2, high=_MOST_STREAMS),
            laurel_rank=fields.integer("laurel_rank", high=2**14),
            cutoffs=_cutoffs(fields),
            correct_scale=fields.flag("altup_correct_scale", default=True),
        ),
    }


GEMMA3N = Family(
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    tensors={**MODEL, **_LAYER, **layer_inputs("model."), **_streams("model.")},
    reads=("layer_types", "sliding_window", "final_logit_softcapping", "intermediate_size"),
    flags=_gemma3n,
    defaults={
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
    },
    activations={"gelu_pytorch_tanh": "gelu_tanh"},
    rope_theta=1e6,
    rope_local=True,
    ignores=UNUSED_KEYS,
)
# Its decoder: pictures and sound are not read.
GEMMA3N_VISION = within_vision_model(
    GEMMA3N,
    "Gemma3nForConditionalGeneration",
    "gemma3n",
    model=LANGUAGE_MODEL,
    ignores=OTHER_SENSES + UNUSED_KEYS,
    others=layer_inputs(LANGUAGE_MODEL) | _streams(LANGUAGE_MODEL),
)
