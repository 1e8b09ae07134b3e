"""A model in a GGUF file: its metadata as config.json, so that one reader checks both, and its tensors by our names.

Keys are those of ggml's `docs/gguf.md`. A key of the architecture that is not listed here is rejected by name, like
an unsupported field of config.json.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import FULL, SLIDING, ModelConfig
from xla_engine.model_loader.chat_templates import SPECIAL_TOKENS, ChatTemplate
from xla_engine.model_loader.families import ENCODERS, FAMILIES, Family
from xla_engine.model_loader.families.dense import MINISTRAL3
from xla_engine.model_loader.families.encoders import HEADS
from xla_engine.model_loader.families.experts import GPT_OSS
from xla_engine.model_loader.families.gguf_tensors import (
    GGUF_TENSORS,
    KEYS_AND_VALUES_APART,
    MAMBA_MODULES,
    mamba_in,
)
from xla_engine.model_loader.families.latent import DEEPSEEK_V2, DEEPSEEK_V3
from xla_engine.model_loader.gguf.architectures import architecture, read_pooling_type
from xla_engine.model_loader.gguf.numbers import KEY_HEADS, number, vector
from xla_engine.model_loader.gguf.parts import parts_of
from xla_engine.model_loader.gguf.reader import GgufReader, library
from xla_engine.model_loader.gguf.tokenizer import tokenizer_of
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.model_loader.tokenizer_json import raising, read_tokenizer

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_FIELDS = {
    "{arch}.context_length": "max_position_embeddings",
    "{arch}.embedding_length": "hidden_size",
    "{arch}.block_count": "num_hidden_layers",
    "{arch}.feed_forward_length": "intermediate_size",
    "{arch}.attention.head_count": "num_attention_heads",
    "{arch}.attention.head_count_kv": "num_key_value_heads",
    "{arch}.attention.key_length": "head_dim",
    "{arch}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{arch}.attention.layer_norm_epsilon": "layer_norm_eps",
    "{arch}.attention.sliding_window": "sliding_window",
    "{arch}.attention.scale": "attention_multiplier",
    "{arch}.attn_logit_softcapping": "attn_logit_softcapping",
    "{arch}.final_logit_softcapping": "final_logit_softcapping",
    "{arch}.rope.freq_base": "rope_theta",
    "{arch}.rope.freq_base_swa": "rope_local_base_freq",
    "{arch}.embedding_scale": "embedding_multiplier",
    "{arch}.residual_scale": "residual_multiplier",
    "{arch}.logit_scale": "logits_scaling",
    "{arch}.attention.causal": "is_causal",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
}
_EXPERT_FIELDS = {
    "{arch}.expert_count": "num_experts",
    "{arch}.expert_used_count": "num_experts_per_tok",
    "{arch}.expert_feed_forward_length": "moe_intermediate_size",
    "{arch}.expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "{arch}.expert_weights_norm": "norm_topk_prob",
}
_PLAIN = ("norm_topk_prob", "is_causal", "hidden_act")  # fields that are no numbers
_RECURRENT_FIELDS = {
    "{arch}.full_attention_interval": "full_attention_interval",
    "{arch}.ssm.conv_kernel": "linear_conv_kernel_dim",
    "{arch}.ssm.state_size": "linear_key_head_dim",
    "{arch}.ssm.group_count": "linear_num_key_heads",
    "{arch}.ssm.time_step_rank": "linear_num_value_heads",
    "{arch}.ssm.inner_size": "linear_value_features",
}
_ROPE = "{arch}.rope.scaling."
_TEMPERATURE = "{arch}.attention.temperature_scale"
_PREDICTS = "{arch}.nextn_predict_layers"
_SLIDES = "{arch}.attention.sliding_window_pattern"
_HANDLED = {  # below, or of no account in text
    "{arch}.vocab_size",
    "{arch}.rope.dimension_sections",
    "{arch}.n_deepstack_layers",
    "{arch}.pooling_type",
    "{arch}.classifier.output_labels",
    _PREDICTS,
    _SLIDES,
    "{arch}.attention.value_length_swa",
    "{arch}.rope.dimension_count_swa",
    "{arch}.attention.value_length",
    "{arch}.rope.dimension_count",
    *(_ROPE + name for name in ("type", "factor", "original_context_length", "finetuned", "attn_factor")),
    _TEMPERATURE,
    "{arch}.use_parallel_residual",  # as the tensors say
    *(_ROPE + f"yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier", "ext_factor")),
    "{arch}.tensor_data_layout",
}
_EXPERT = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.(\w+)\.(weight|bias)")
_ROUTER = re.compile(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)")  # of Gemma 4
_ROUTERS = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
_PROJECTION = re.compile(r"(model\.altup_(?:unembed_)?projections)\.(\d+)\.(weight)")
_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_fields(file: GgufReader) -> Fields:
    """The metadata as fields of config.json. Raises CheckpointError naming an unsupported key."""
    kind = architecture(file)
    prefix = f"{file.get('general.architecture')}."
    words = {
        **_FIELDS,
        **(_EXPERT_FIELDS if kind.experts else {}),
        **(_RECURRENT_FIELDS if kind.recurrent else {}),
        **kind.keys,
    }
    known = {key.replace("{arch}.", prefix) for key in (*words, *kind.handled, *_HANDLED)}
    only = {key.replace("{arch}.", prefix): value for key, value in kind.only.items()}
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key not in known and value not in (0, False, [], "", only.get(key, 0)):
            raise CheckpointError(
                f"{file.path}: {key} = {value!r}: not supported. Use another file of the model"
            )
    values: dict[str, Any] = {
        **kind.fields,
        "architectures": [kind.architecture],
        "model_type": _family(kind.architecture).model_type,
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key, word in words.items():
        told_by_layer = key in kind.uneven and isinstance(file.get(key), list)
        value = file.get(key) if word in _PLAIN else None if told_by_layer else number(file, key)
        if value is not None and (word, value) != ("sliding_window", 0):
            values[kind.words.get(word, word)] = value
    # ends of text, turn and message
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    values["eos_token_id"] = [number for number in ends if number is not None]
    values |= {word: tensor in file.tensors for word, tensor in kind.biases.items()}
    values |= {word: tensor not in file.tensors for word, tensor in kind.lacks.items()}
    _read_layers(file, values)
    read_pooling_type(file, values)
    if kind.finish is not None:
        kind.finish(file, values)
    if kind.rope and (scaling := _rope_scaling(file, values)) is not None:
        values["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":  # Phi's files repeat it in the outer object
            values["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if kind.widths:
        _read_widths(file, values)
    if kind.name in ("gemma2", "gemma3", "gemma-embedding"):
        values["query_pre_attn_scalar"] = _gemma_scale(values)
    return Fields(file.path, values)


def tensor_names(file: GgufReader, wanted: Iterable[str]) -> dict[str, tuple[str, int | None]]:
    """Map transformers' names in `wanted` to the file's; an expert's tensor maps to the stacked one and its index."""
    gguf = library()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers, predicts = number(file, "{arch}.block_count"), number(file, _PREDICTS) or 0
    names = gguf.get_tensor_name_map(kinds[file.get("general.architecture")], layers)
    head, found = _classifier(architecture(file).architecture), {}
    for name in wanted:
        known = _predicting(name, layers - predicts) if predicts else name
        expert = _EXPERT.fullmatch(known)
        if expert is not None:
            layer, place, part, suffix = expert.groups()
            known = f"model.layers.{layer}.mlp.experts.{_MIXTRAL_PARTS.get(part, part)}.{suffix}"
        elif (expert := _PROJECTION.fullmatch(known)) is not None:  # of a stream
            stem, place, suffix = expert.groups()
            known = f"{stem}.{suffix}"
        stem, _, suffix = known.rpartition(".")
        known = f"{head[stem]}.{suffix}" if stem in head else known
        known = _ROUTER.sub(lambda match: f"blk.{match[1]}.{_ROUTERS[match[2]]}", known)
        known = known.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = (
            known
            if known.startswith(("blk.", "cls."))
            else names.get_name(known, try_suffixes=(".weight", ".bias"))
        )
        if theirs is not None and theirs not in file.tensors and f"{theirs}.weight" in file.tensors:
            theirs = f"{theirs}.weight"  # attention sinks
        if theirs is not None:
            found[name] = theirs, None if expert is None else int(place)
    return found


def _classifier(architecture: str) -> dict[str, str]:
    """The file's names of an encoder's classifier, whatever transformers calls its layers."""
    if (head := HEADS.get(architecture)) is None:
        return {}
    return {head.layer: "cls", head.norm: "cls.norm", head.classes: "cls.output"}


_PREDICTING = {  # what multi-token prediction has beside a layer
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head_norm.",
}


def _predicting(name: str, first: int) -> str:
    """The name of a tensor of multi-token prediction, whose layers follow the model's. first: their first index."""
    if (layer := re.match(r"mtp\.layers\.(\d+)\.", name)) is not None:
        return f"model.layers.{first + int(layer[1])}.{name[layer.end() :]}"
    for ours, theirs in _PREDICTING.items():
        if name.startswith(ours):
            return f"blk.{first}.nextn.{theirs}{name.removeprefix(ours)}"
    return name


def _read_layers(file: GgufReader, values: dict[str, Any]) -> None:
    """Read what differs between layers: which of them predict further tokens, slide, or are recurrent."""
    kind = architecture(file)
    if predicts := number(file, _PREDICTS):
        values["num_hidden_layers"] = (values.get("num_hidden_layers") or 0) - predicts
    slides = file.get(_SLIDES)
    if isinstance(slides, list) and values.get("sliding_window"):
        count = values.get("num_hidden_layers")
        values["layer_types"] = [SLIDING if each else FULL for each in slides[:count]]
    elif slides and not isinstance(slides, list):
        values[kind.words.get("sliding_window_pattern", "sliding_window_pattern")] = number(file, _SLIDES)
    keys, keyless = file.get(KEY_HEADS), kind.keyless
    if keyless and isinstance(keys, list):
        values["layer_types"] = [FULL if each else keyless for each in keys]
    features, heads = values.pop("linear_value_features", None), values.get("linear_num_value_heads")
    if features and heads:
        values["linear_value_head_dim"] = features // heads


def _family(architecture: str) -> Family:
    return FAMILIES[architecture] if architecture in FAMILIES else ENCODERS[architecture]


def _vocabulary(file: GgufReader) -> int | None:
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding is not None else file.get("{arch}.vocab_size")


def _read_widths(file: GgufReader, values: dict[str, Any]) -> None:
    """Read head widths. Value heads must be as wide as key heads; the rotary part may be narrower."""
    if not values.get("hidden_size") or not values.get("num_attention_heads"):
        return  # the reader of the fields rejects them
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    valued = file.get("{arch}.attention.value_length")
    if valued not in (None, width):
        raise CheckpointError(
            f"{file.path}: attention.value_length = {valued}: not supported beside key heads of {width}. Use another "
            "model"
        )
    rotated = number(file, "{arch}.rope.dimension_count")
    defaults = _family(architecture(file).architecture).defaults
    if rotated == width and "partial_rotary_factor" in defaults:
        values["partial_rotary_factor"] = 1.0
    elif rotated is not None and 0 < rotated < width:
        values["partial_rotary_factor"] = rotated / width
    elif rotated not in (None, width):
        raise CheckpointError(
            f"{file.path}: rope.dimension_count = {rotated}: not supported beside heads of {width}. Use another model"
        )


def _gemma_scale(values: Mapping[str, Any]) -> Any:
    """The attention scale, which is not in the metadata: like llama.cpp, detect the largest model by its layers."""
    largest = {"gemma2": 46, "gemma3_text": 62}[values["model_type"]]
    if values.get("num_hidden_layers") == largest and values.get("num_attention_heads"):
        return values.get("hidden_size", 0) // values["num_attention_heads"]
    return values.get("head_dim")


def _rope_scaling(file: GgufReader, values: Mapping[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _from_divisors(file, values)
    kind = file.get(_ROPE + "type")
    if kind in (None, "none"):
        factors = {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("short", "long")}
        if not file.tensors.keys() >= set(factors.values()):
            return None
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": file.get(_ROPE + "original_context_length"),
            "attention_factor": file.get(_ROPE + "attn_factor"),
            **{word: vector(file, name) for word, name in factors.items()},
        }
    scaling = {
        "rope_type": kind,
        "factor": file.get(_ROPE + "factor"),
        "original_max_position_embeddings": file.get(_ROPE + "original_context_length"),
    }
    if kind == "yarn":
        names = {
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
            "attention_factor": "attn_factor",
        }
        scaling |= {ours: file.get(_ROPE + theirs) for ours, theirs in names.items()}
        if values["model_type"] == MINISTRAL3.model_type:
            scaling["llama_4_scaling_beta"] = file.get(_TEMPERATURE)
            scaling["attention_factor"] = 1.0  # of these models, `mscale` and `mscale_all_dim` are equal
        if values["model_type"] in (DEEPSEEK_V2.model_type, DEEPSEEK_V3.model_type):
            scaling |= _temperature(file)
        if values["model_type"] == GPT_OSS.model_type:
            scaling["truncate"] = False  # as the model was trained
    elif kind == "linear":
        del scaling["original_max_position_embeddings"]
    return scaling


def _temperature(file: GgufReader) -> dict[str, Any]:
    """YaRN's temperature of latent attention. Of these models, `mscale` and `mscale_all_dim` are equal, and llama.cpp
    has a tenth of them."""
    tenth = number(file, _ROPE + "yarn_log_multiplier")
    if tenth is None:
        return {}
    return dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * tenth:.6g}"))


def _from_divisors(file: GgufReader, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rope scaling from divisors of frequencies, which llama.cpp stores for Llama 3's scaling.

    If Llama 3's usual parameters give the same divisors, use the parameters, so that the table has the bits of the
    original model; else use the divisors.
    """
    divisors = np.array(vector(file, "rope_freqs.weight"))
    scaling = {"factor": float(divisors.max(initial=0)), **_LLAMA3}
    base, count = float(values.get("rope_theta") or 10000.0), max(1, len(divisors))
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    with np.errstate(all="ignore"):  # for any file content; a value that is not finite matches nothing
        wavelengths = 2 * np.pi * base ** (np.arange(count) / count)
        kept = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
        usual = np.allclose(divisors, 1 / (kept + (1 - kept) / scaling["factor"]), rtol=1e-4)
    if usual:
        return {"rope_type": "llama3", **scaling}
    context = values.get("max_position_embeddings")
    factors = divisors.tolist()
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
        "short_factor": factors,
        "long_factor": factors,
    }


def _groups_norms(file: GgufReader) -> bool:
    """Whether norms of Mamba layers have a row for each group."""
    shapes = [info.shape for name, info in file.tensors.items() if name.endswith(".ssm_norm.weight")]
    return any(len(shape) > 1 for shape in shapes)


class GgufFile:
    """`ModelFiles` of a GGUF file. The header is read once, on first use.

    path: the file; of a split one, the first part.

    A tokenizer.json next to the file takes precedence over the tokenizer in its metadata.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of a split one."""
        first = parts_of(path)[0]
        self.path = first if first.exists() else path

    @cached_property
    def reader(self) -> GgufReader:
        """The open file. Raises CheckpointError."""
        return GgufReader(self.path)

    def config_fields(self) -> Fields:
        return config_fields(self.reader)

    def generation_config(self) -> Fields:
        """llama.cpp's sampling defaults in the metadata, as fields of generation_config.json."""
        values = {theirs: self.reader.get(f"general.sampling.{name}") for name, theirs in _SAMPLING.items()}
        return Fields(self.path, values)

    def tensors(self, names: Iterable[str] = ()) -> TensorFiles:
        wanted = list(names)
        return self.reader.weights(tensor_names(self.reader, wanted) if wanted else {})

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        """Rotary pairs may be adjacent, norms include their offset, and some leaves are stored otherwise. Layers
        that predict further tokens follow the model's, and are not of it."""
        own = GGUF_TENSORS.get(family.architecture, {})
        if (module := MAMBA_MODULES.get(family.architecture)) is not None:
            own = {**own, **mamba_in(module, grouped=_groups_norms(self.reader))}
        if "blk.0.attn_k_b.weight" in self.reader.tensors:
            own = {**own, **KEYS_AND_VALUES_APART}
        interleaved = architecture(self.reader).interleaved or config.rope_interleaved
        layers, beside = config.num_hidden_layers, architecture(self.reader).beside
        further = "|".join(str(layers + each) for each in range(number(self.reader, _PREDICTS) or 0))
        return replace(config, rope_interleaved=interleaved), replace(
            family,
            norm_offset=0.0,
            tensors={**family.tensors, **own},
            ignores=rf"blk\.({further})\..*" if further else beside or family.ignores,
        )

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        found = read_tokenizer(self.path.parent)
        if found is not None:
            return found
        with raising(CheckpointError, f"{self.path}: not a usable tokenizer. Download the file again"):
            return tokenizer_of(self.reader)

    def chat_template(self) -> ChatTemplate | None:
        file = self.reader
        sources = {
            key.removeprefix(_TEMPLATE).removeprefix(".") or "default": source
            for key, source in file.metadata.items()
            if (key == _TEMPLATE or key.startswith(_TEMPLATE + ".")) and isinstance(source, str)
        }
        tokens = file.get("tokenizer.ggml.tokens")
        tokens = tokens if isinstance(tokens, list) else []
        ids = {name: file.get(f"tokenizer.ggml.{name}_id") for name in SPECIAL_TOKENS}
        special = {
            name: str(tokens[number])
            for name, number in ids.items()
            if isinstance(number, int) and 0 <= number < len(tokens)
        }
        return ChatTemplate(sources=sources, special_tokens=special) if sources else None
