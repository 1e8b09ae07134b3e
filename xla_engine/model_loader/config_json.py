"""Read config.json and generation_config.json of a Hugging Face directory into a ModelConfig, or fail clearly.

A field that would change the computation and is not supported is rejected by name, never ignored. `auto_map` is
ignored: no code from a checkpoint is run, and built-in architectures do not need it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import FULL, SLIDING, ModelConfig
from xla_engine.graphs.forms import RopeScaling
from xla_engine.graphs.ops.rope import natural_log, power
from xla_engine.model_loader.families import ENCODERS, FAMILIES, OTHER_DECODERS, Family
from xla_engine.model_loader.families.family import sees_later_tokens
from xla_engine.model_loader.families.refused import why_refused
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.quantised.methods import MXFP4, check_quantisation

# Limits far above any real model, which keep products of sizes below 2**63 and every table small.
_CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**9,  # each layer takes milliseconds before any tensor is checked
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31 - 1,
}

# Fields that change what a decoder computes: the neutral values (and null), and the meaning of others. A family reads
# some of them (`Family.reads`); the rest must be neutral.
_PLAIN: dict[str, tuple[tuple[object, ...], str]] = {
    "attention_bias": ((False,), "biases on the attention projections"),
    "mlp_bias": ((False,), "biases on the MLP projections"),
    "pretraining_tp": ((1,), "sliced projections; the weights are the same with 1, so set it to 1"),
    "sliding_window": ((), "windowed attention"),
    "use_sliding_window": ((False,), "windowed attention"),
    "rope_interleaved": ((False,), "interleaved rotary pairs"),
    "no_rope_layers": (([],), "layers without rotary embedding"),
    "clip_qkv": ((), "clipped projections"),
    "use_qk_norm": ((False,), "normalised queries and keys"),
    "attn_logit_softcapping": ((), "capped attention scores"),
    "final_logit_softcapping": ((), "capped logits"),
    "attention_multiplier": ((), "another attention scale"),
    "embedding_multiplier": ((1,), "scaled embeddings"),
    "residual_multiplier": ((1,), "scaled residuals"),
    "logits_scaling": ((1,), "scaled logits"),
    "logit_scale": ((1,), "scaled logits"),
    "use_mrope": ((False,), "multimodal rotary embedding"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
}

# Rotary fields. The sections of multimodal positions all have the same position in text.
_ROPE_COMMON = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}
_ORIGINAL = "original_max_position_embeddings"
# Fields allowed for each type; others would have no effect and are rejected.
_ROPE_KNOWN = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "llama_4_scaling_beta", "max_position_embeddings"),
    },
    "longrope": {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}
_OLD_NAMES = {"su": "longrope"}
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids that end a text, in the file's order and unique, and the id that begins one, if any."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_config(model: ModelFiles | Path | str) -> ModelConfig:
    """The ModelConfig of a model (`open_model`); weights and tokenizer need not exist.

    Fields that real files omit get transformers' defaults: head_dim, num_key_value_heads, rms_norm_eps,
    max_position_embeddings, tie_word_embeddings, and those of the family. The others are required.
    Raises CheckpointError naming file, field and remedy.
    """
    return read_model(open_model(model))[0]


def overridden(fields: Fields, overrides: Mapping[str, Any]) -> Fields:
    """config.json with `overrides`. A rotary embedding object replaces all of the file's rotary fields.

    `max_model_len`, as in vLLM, sets the model's limit of positions.
    """
    values = dict(fields.values)
    overrides = {
        "max_position_embeddings" if name == "max_model_len" else name: each
        for name, each in overrides.items()
    }
    if rope := overrides.keys() & {"rope_parameters", "rope_scaling"}:
        for name in ("rope_parameters", "rope_scaling"):
            values.pop(name, None)
        if any("rope_theta" in overrides[name] for name in rope):
            values.pop("rope_theta", None)
    return Fields(fields.file, {**values, **overrides})


def read_model(files: ModelFiles, fields: Fields | None = None) -> tuple[ModelConfig, Family]:
    """`read_config`, and the family that names the tensors. fields: replaces config.json's."""
    return files.as_stored(*transformers_model(files.config_fields() if fields is None else fields))


def transformers_model(fields: Fields) -> tuple[ModelConfig, Family]:
    """`read_model` in transformers' layout, whatever files the model is in; adapters and trainers use this layout."""
    family = _family(fields)
    fields = _text_fields(fields, family) if family.text_type else fields
    fields = fields.with_defaults(_defaults(fields, family))
    _check_plain(fields, family)
    if not family.mxfp4:
        check_quantisation(fields)
    hidden_size = _size(fields, "hidden_size")
    heads = _size(fields, "num_attention_heads")
    if fields.values.get("head_dim") is None and hidden_size % heads:
        fields.fail(
            "hidden_size", f"not a multiple of num_attention_heads = {heads}. Add head_dim or correct it"
        )
    fields = _with_base(fields, hidden_size // heads)
    fields = _of_all_layers(fields, "intermediate_size") if "intermediate_size" in family.reads else fields
    rope, rope_limit = read_rope(fields, family)
    longest = _size(fields, "max_position_embeddings", default=2048)
    sizes = {
        "vocab_size": _size(fields, "vocab_size"),
        "intermediate_size": _size(fields, "intermediate_size"),
        "num_hidden_layers": _size(fields, "num_hidden_layers"),
        "num_key_value_heads": _size(fields, "num_key_value_heads", default=heads),
        "head_dim": _size(fields, "head_dim", default=hidden_size // heads),
        "max_position_embeddings": max(longest, rope_limit),
    }
    try:
        config = ModelConfig(
            **{
                "hidden_size": hidden_size,
                "num_attention_heads": heads,
                "hidden_act": _activation(fields, family),
                "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6, high=1.0),
                "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
                "bidirectional": family.architecture not in ENCODERS and sees_later_tokens(fields),
                **sizes,
                **rope,
                **family.flags(fields),
            }
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.file}: {error}. Correct the file or download it again") from error
    return config, family


def read_special_tokens(files: ModelFiles, config: ModelConfig) -> SpecialTokens:
    """Ids that end and begin a text: from generation_config.json if it has them, else from config.json."""
    eos: tuple[int, ...] = ()
    bos: tuple[int, ...] = ()
    config_json = files.config_fields()
    text = config_json.within("text_config")  # of a vision-language model
    for fields in (files.generation_config(), config_json, text):
        if fields is None:
            continue
        eos = eos or fields.token_ids("eos_token_id", config.vocab_size)
        bos = bos or fields.token_ids("bos_token_id", config.vocab_size)
        if len(bos) > 1:
            fields.fail("bos_token_id", "more than one id. Keep the one that begins a text")
    return SpecialTokens(eos_token_ids=eos, bos_token_id=bos[0] if bos else None)


def _defaults(fields: Fields, family: Family) -> Mapping[str, Any]:
    """The family's defaults; a rotary part that a rope object gives is none of them."""
    given = any(
        rope.given("partial_rotary_factor") for rope in fields.objects("rope_parameters", "rope_scaling")
    )
    return {
        name: value
        for name, value in family.defaults.items()
        if not (given and name == "partial_rotary_factor")
    }


def _size(fields: Fields, name: str, default: int | None = None) -> int:
    return fields.integer(name, high=_CEILINGS[name], default=default)


def _of_all_layers(fields: Fields, name: str) -> Fields:
    """The fields, with one number where the file has a list of the same number for each layer."""
    value = fields.values.get(name)
    if not isinstance(value, list) or not value:
        return fields
    if any(each != value[0] for each in value):
        fields.fail(
            name, "layers that differ in it are not supported. Use a checkpoint whose layers are alike"
        )
    return Fields(fields.file, {**fields.values, name: value[0]})


def _family(fields: Fields) -> Family:
    names = fields.values.get("architectures")
    known = FAMILIES | ENCODERS
    remedy = f"Use a checkpoint of: {', '.join(known)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        fields.fail("architectures", f"must be a list of one architecture name. {remedy}")
    if names[0] not in known and (why := why_refused(names[0])) is not None:
        fields.fail("architectures", why)
    if names[0] not in known:
        remote = "; the code that its auto_map points to is never run" if "auto_map" in fields.values else ""
        fields.fail("architectures", f"not supported{remote}. {remedy}")
    family = known[names[0]]
    if family.text_type and (text := fields.within("text_config")) is not None:
        family = OTHER_DECODERS.get((names[0], text.values.get("model_type")), family)
    if fields.values.get("model_type") not in (None, family.model_type, *family.also_types):
        fields.fail("model_type", f"contradicts the architecture {names[0]}. {remedy}")
    if family.mxfp4 and (quantised := fields.within("quantization_config")) is not None:
        if quantised.values.get("quant_method") != MXFP4:
            quantised.fail("quant_method", "not supported. Use an unquantised or an MXFP4 checkpoint")
        return replace(family, tensors={**family.tensors, **family.mxfp4})
    return family


def _text_fields(fields: Fields, family: Family) -> Fields:
    """The decoder's fields of a vision-language model, plus the quantisation, which is in the outer object, and
    whether the head is tied, if only the outer object says so. Files of PaddleOCR-VL have no inner object; in those of
    DeepSeek-OCR-2 it is `language_config`."""
    text = fields.within("text_config") or fields.within("language_config")
    if text is None and fields.given("hidden_size"):
        return fields
    if text is None:
        fields.fail(
            "text_config", f"must describe the decoder of {family.architecture}. Download the file again"
        )
    if text.values.get("model_type") not in (None, family.text_type):
        text.fail("model_type", f"not supported within {family.architecture}, only {family.text_type!r} is")
    outer = {"quantization_config": fields.values.get("quantization_config")}
    if fields.given("tie_word_embeddings"):
        outer["tie_word_embeddings"] = fields.values["tie_word_embeddings"]
    return text.with_defaults(outer)


def _check_plain(fields: Fields, family: Family) -> None:
    """Raise CheckpointError unless every field that the family does not read has a neutral value."""
    for name in _PLAIN.keys() - set(family.reads):
        plain, meaning = _PLAIN[name]
        value = fields.values.get(name)
        if value is not None and value not in plain:
            fields.fail(name, f"not supported ({meaning}) for {family.architecture}. Use a plain checkpoint")
    layers = fields.values.get("layer_types")
    if "layer_types" in family.reads or layers is None:
        return
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        fields.fail(
            "layer_types",
            f'only "full_attention" is supported for {family.architecture}. Use a plain checkpoint',
        )


def _activation(fields: Fields, family: Family) -> str:
    name = "hidden_activation" if fields.given("hidden_activation") else "hidden_act"
    value = fields.values.get(name) or "silu"
    if not isinstance(value, str) or value not in family.activations:
        fields.fail(name, f"not supported. Use a checkpoint with one of: {', '.join(family.activations)}")
    return family.activations[value]


def read_rope(fields: Fields, family: Family) -> tuple[dict[str, Any], int]:
    """The rotary fields of `ModelConfig`, and the positions that the scaling allows; 0 if it does not say.

    Reads scaling from `rope_scaling` (transformers 4) or `rope_parameters` (5), and the base inside or outside. A
    family whose sliding-window layers have their own base may have one object for each type of layer.
    Raises CheckpointError naming file, field and remedy.
    """
    objects = fields.objects("rope_parameters", "rope_scaling")
    local = _of_layers(objects, SLIDING) if family.rope_local else []
    objects = _of_layers(objects, FULL) if family.rope_local else objects
    scalings = [_read_scaling(rope, fields) for rope in objects]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.fail("rope_scaling", "contradicts rope_parameters. Keep the one that is right")
    scaling = scalings[0] if scalings else None
    if scaling is not None and scaling.rope_type == "proportional":
        part = None  # the share of the pairs that turn, and not of the dimensions that have pairs
    else:
        part = _agreed([fields, *objects, *local], "partial_rotary_factor", 1.0)
    if part not in (None, 1.0) and "partial_rotary_factor" not in family.reads:
        raise CheckpointError(
            f"{fields.file}: partial_rotary_factor = {part}: not supported (rotary embedding of a part of each head). "
            "Use 1"
        )
    beta = _agreed(objects, "llama_4_scaling_beta", 1e3)
    if beta is not None and "llama_4_scaling_beta" not in family.reads:
        objects[0].fail(
            "llama_4_scaling_beta", f"not supported (queries scaled by position) for {family.architecture}"
        )
    limit = 0
    # Gemma 3's max_position_embeddings is the scaled one already.
    stretched = ("dynamic", "yarn") if family.rope_local else ("linear", "dynamic", "yarn")
    if scaling is not None and scaling.rope_type in stretched:
        limit = min(int(scaling.original_max_position_embeddings * scaling.factor), _LARGEST)
    theta = _agreed([fields, *objects], "rope_theta", 1e15) or family.rope_theta
    return {
        "rope_theta": theta,
        "rope_local_base_freq": _local_theta(fields, local, theta) if family.rope_local else None,
        "rope_scaling": scaling,
        "partial_rotary_factor": part or 1.0,
        "llama_4_scaling_beta": beta,
    }, limit


def _with_base(fields: Fields, head_dim: int) -> Fields:
    """The fields without Hunyuan's scaling, which is called dynamic, but stretches the base alike for all texts.

    The base is multiplied by `alpha ** (d / (d - 2))` for heads of d features (NTK-aware scaling).
    """
    for rope in fields.objects("rope_parameters", "rope_scaling"):
        kind = rope.values.get("rope_type", rope.values.get("type"))
        if kind != "dynamic" or not rope.given("alpha"):
            continue
        size = fields.integer("head_dim", high=2**14, low=4, default=head_dim)
        theta = _agreed([fields, *fields.objects("rope_parameters", "rope_scaling")], "rope_theta", 1e15)
        base = (theta or 10000.0) * power(rope.number("alpha", high=1e9), size / (size - 2))
        values = {"rope_theta": base, "rope_scaling": None, "rope_parameters": None}
        return Fields(fields.file, {**fields.values, **values})
    return fields


def _of_layers(objects: list[Fields], kind: str) -> list[Fields]:
    """The rope objects of one type of layer; an object without types belongs to full-attention layers."""
    found = []
    for rope in objects:
        if FULL in rope.values or SLIDING in rope.values:
            found += rope.objects(kind)
        elif kind == FULL:
            found.append(rope)
    return found


def _local_theta(fields: Fields, objects: list[Fields], theta: float) -> float:
    """The base of sliding-window layers: from their own object, `rope_local_base_freq`, or the base of the others."""
    for rope in objects:
        if _read_scaling(rope, fields) is not None:
            rope.fail("rope_type", 'not supported for sliding layers. Use "default"')
        if rope.given("rope_theta"):
            return rope.number("rope_theta", high=1e15)
    return fields.number("rope_local_base_freq", high=1e15, default=theta)


def _agreed(sources: list[Fields], name: str, high: float) -> float | None:
    """The number that all of the objects that have it must give alike; None if none has it."""
    found = {source.number(name, high=high) for source in sources if source.given(name)}
    if len(found) > 1:
        sources[0].fail(name, f"given as {sorted(found)} in one file. Keep the one that is right")
    return found.pop() if found else None


def _read_scaling(rope: Fields, config: Fields) -> RopeScaling | None:
    """The scaling; None for type "default". All parameters of a type are required, although transformers guesses
    some."""
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    kind = rope.values.get(name)
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _ROPE_KNOWN:
        rope.fail(name, f"not supported. Supported rope types: {', '.join(_ROPE_KNOWN)}")
    for key, value in rope.values.items():
        if key not in _ROPE_COMMON | _ROPE_KNOWN[kind] and value is not None:
            rope.fail(key, f"no parameter of rope type {kind}. Remove it or correct the type")
    if kind == "default":
        return None
    original = _original(kind, rope, config)
    found: dict[str, Any] = {"rope_type": kind, "original_max_position_embeddings": original}
    if kind == "longrope":
        return RopeScaling(**found, **_longrope(rope, config, original))
    if kind == "proportional":
        turning = rope.number("partial_rotary_factor", high=1.0, default=1.0)
        return RopeScaling(**found, factor=rope.number("factor", high=1e6, default=1.0), turning=turning)
    found["factor"] = rope.number("factor", high=1e6)
    if kind == "llama3":
        low = rope.number("low_freq_factor", high=1e6)
        high = rope.number("high_freq_factor", high=1e6)
        if high <= low:
            rope.fail("high_freq_factor", f"must be above low_freq_factor = {low:g}. Correct the file")
        found |= {"low_freq_factor": low, "high_freq_factor": high}
    elif kind == "yarn":
        found |= {
            "beta_fast": rope.number("beta_fast", high=1e6, default=32.0),
            "beta_slow": rope.number("beta_slow", high=1e6, default=1.0),
            "truncate": rope.flag("truncate", default=True),
            "attention_factor": _yarn_attention(rope, found["factor"]),
        }
    return RopeScaling(**found)


def _original(kind: str, rope: Fields, config: Fields) -> int:
    """The context length before scaling; for linear and dynamic scaling, the one in config.json."""
    inside, beside = (source.values.get(_ORIGINAL) for source in (rope, config))
    if inside is not None and beside not in (None, inside):
        config.fail(_ORIGINAL, "contradicts the rope object. Keep the right one")
    if kind in ("linear", "dynamic", "proportional") and inside is None:
        return config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    if kind == "longrope" and inside is None:
        return config.integer(_ORIGINAL, low=2, high=_LARGEST)
    # at least 2, because longrope divides by its logarithm
    return rope.integer(_ORIGINAL, low=2 if kind == "longrope" else 1, high=_LARGEST)


def _yarn_attention(rope: Fields, factor: float) -> float:
    """The given attention factor, or the paper's (Peng et al. 2023, section 3.4)."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * natural_log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", high=1e6)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        above, below = (rope.number(name, high=1e6) for name in ("mscale", "mscale_all_dim"))
        return temperature(above) / temperature(below)
    return temperature(1.0)


def _longrope(rope: Fields, config: Fields, original: int) -> dict[str, Any]:
    longest = config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    factor = rope.number("factor", high=1e6, default=longest / original)
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor", high=1e6)
    else:
        attention = math.sqrt(1 + natural_log(factor) / natural_log(original)) if factor > 1 else 1.0
    lists = {name: rope.numbers(name, high=1e6) for name in ("short_factor", "long_factor")}
    return {"factor": factor, "attention_factor": attention, **lists}
