"""Load an EAGLE-3 head, in the format of SafeAILab/EAGLE and SpecForge or of vllm-project/speculators.

The meaning of fields follows vLLM's `llama_eagle3.py` and `speculators/algos.py`, and SGLang's `llama_eagle3.py`. A
field that would change the computation and is not supported is rejected by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, check_tensors
from xla_engine.model_loader.config_json import overridden, read_model
from xla_engine.model_loader.families import Source
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.model_loader.weights import StoredWeights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER = "Use a head that was trained for this model"
_CHANGES = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")
_OF_HEAD = ("draft_vocab_size", "target_hidden_size", _LAYER_IDS, *_CHANGES[:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Checkpoint:
    """A loaded head.

    config: of its one layer as a model; token ids are the target model's.
    taps: layers of the target model before which the residual stream is read; the number of layers means after the
    last.
    norm_before_residual: see `graphs.steps.draft_head.eagle3_form`.
    weights: by the names of `graphs.steps.draft_head.Eagle3Weights`. Without `embed`, the target's embedding is used.
    ids: the target's token id of each of the head's ids, i32; None if they are equal.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    norm_before_residual: bool
    weights: StoredWeights
    ids: np.ndarray[Any, Any] | None


def load_eagle3(model: Path | str, target: Checkpoint) -> Eagle3Checkpoint:
    """Load a head from a directory or the hub, in the dtype of the model `target` that it drafts for.

    Raises CheckpointError naming file, field or tensor and remedy, also if head and target do not match.
    """
    brought = open_model(model)
    if not brought.path.is_dir():
        raise CheckpointError(
            f"{brought.path}: an EAGLE-3 head is read from a directory of safetensors. Name one"
        )
    own = brought.config_fields()
    fields = _fields(own)
    config, _ = read_model(brought, overridden(own, fields.values))
    taps = _fitting(fields, config, target.config)
    files = brought.tensors()
    ids = _ids(
        files, fields.integer("draft_vocab_size", high=config.vocab_size, default=config.vocab_size), config
    )
    known = config.vocab_size if ids is None else len(ids)
    sources = _sources(files, config, known, len(taps) * target.config.hidden_size)
    if "lm_head.weight" not in files.tensors:
        raise CheckpointError(
            f"{files.names}: tensor lm_head.weight is missing. Use a head that has an output head of its own"
        )
    check_tensors(files, sources, config, "d2t|t2d")
    shapes = {
        leaf: (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) for leaf, parts in sources.items()
    }
    weights = StoredWeights(files, sources, shapes, target.dtype)
    if "embed" in sources and _is_the_model_s(weights, target):
        del sources["embed"], shapes["embed"]
    differs = config.hidden_size != target.config.hidden_size or target.config.embedding_multiplier != 1
    if "embed" not in sources and differs:
        fields.fail(
            "hidden_size",
            "the head cannot use the model's embedding, which has another size or is scaled. "
            "Use a head with its own embed_tokens.weight",
        )
    return Eagle3Checkpoint(
        config=config,
        taps=taps,
        norm_before_residual=fields.flag("norm_before_residual", default=False),
        weights=weights,
        ids=None if ids is None or np.array_equal(ids, np.arange(config.vocab_size)) else ids,
    )


def _fields(fields: Fields) -> Fields:
    """The fields of the layer, as in a Llama's config.json, and those of the head."""
    values = fields.values
    if "speculators_model_type" in values:
        if values["speculators_model_type"] != "eagle3":
            fields.fail("speculators_model_type", 'only "eagle3" is supported. Use such a head')
        layer = fields.within("transformer_layer_config")
        if layer is None:
            fields.fail("transformer_layer_config", "must describe the layer. Download the file again")
        own = {name: values[name] for name in _OF_HEAD if values.get(name) is not None}
        normed = fields.flag("norm_before_residual", default=True)
        values = {**layer.values, **own, "norm_before_residual": normed}
    else:
        names = values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            fields.fail("architectures", f"not an EAGLE-3 head. Use one of: {', '.join(ARCHITECTURES)}")
    found = Fields(fields.file, values)
    if values.get("model_type") not in (None, "llama"):
        found.fail("model_type", "only heads whose layer is a Llama's are supported. Use such a head")
    for name in _CHANGES:
        if values.get(name) not in (None, False):
            found.fail(name, "not supported for EAGLE-3 heads. Use a head without it")
    if values.get("num_hidden_layers", 1) != 1:
        found.fail("num_hidden_layers", "only heads of one layer are supported. Use such a head")
    as_llama = {"architectures": [ARCHITECTURES[-1]], "model_type": "llama", "tie_word_embeddings": False}
    return Fields(fields.file, {**values, **as_llama})


def _fitting(fields: Fields, config: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target's layers that the head reads. Raises CheckpointError if the sizes of the two do not match."""
    if config.vocab_size != target.vocab_size:
        fields.fail("vocab_size", f"the model has {target.vocab_size} token ids. {_OTHER}")
    sees = "target_hidden_size" if fields.given("target_hidden_size") else "hidden_size"
    if fields.values[sees] != target.hidden_size:
        fields.fail(sees, f"the model's hidden states have {target.hidden_size} features. {_OTHER}")
    layers = target.num_hidden_layers
    within = fields.within("eagle_config")
    if within is not None and not within.flag("use_aux_hidden_state", default=True):
        within.fail(
            "use_aux_hidden_state", "heads that read only the last layer are not supported. Use another"
        )
    if fields.given(_LAYER_IDS):  # as in vLLM
        where, behind = fields, 0
    elif within is not None and within.given(_LAYER_IDS):  # as in SGLang: read after these layers, not before
        where, behind = within, 1
    else:
        taps = (2, layers // 2, layers - 3)
        if layers < 3:
            fields.fail(
                _LAYER_IDS, f"the model has {layers} layers; heads read three of them by default. {_OTHER}"
            )
        return taps
    given = where.values[_LAYER_IDS]
    if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
        where.fail(_LAYER_IDS, "must be a list of layers. Correct the file or download it again")
    taps = tuple(each + behind for each in given)
    if not all(0 <= tap <= layers for tap in taps):
        where.fail(_LAYER_IDS, f"the model has {layers} layers. {_OTHER}")
    return taps


def _sources(files: TensorFiles, config: ModelConfig, known: int, seen: int) -> dict[str, tuple[Source, ...]]:
    """The sources of the head's weights. known: size of its vocabulary. seen: features that it reads from the
    target."""
    size, width = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = "midlayer." if any(name.startswith("midlayer.") for name in files.tensors) else "layers.0."

    def of(name: str, *shape: int) -> Source:
        return Source(name=f"{name}.weight", shape=shape)

    found = {
        "fuse": (of("fc", size, seen),),
        "token_norm": (of(layer + "input_layernorm", size),),
        "hidden_norm": (of(layer + "hidden_norm", size),),
        "qkv": tuple(
            of(f"{layer}self_attn.{part}_proj", rows, 2 * size)
            for part, rows in zip("qkv", (queries, keys, keys), strict=True)
        ),
        "output": (of(layer + "self_attn.o_proj", size, queries),),
        "mlp_norm": (of(layer + "post_attention_layernorm", size),),
        "gate_up": tuple(of(f"{layer}mlp.{part}_proj", width, size) for part in ("gate", "up")),
        "down": (of(layer + "mlp.down_proj", size, width),),
        "final_norm": (of("norm", size),),
        "head": (of("lm_head", known, size),),
    }
    if "embed_tokens.weight" in files.tensors:
        found["embed"] = (of("embed_tokens", config.vocab_size, size),)
    return found


def _ids(files: TensorFiles, known: int, config: ModelConfig) -> np.ndarray[Any, Any] | None:
    """The target's token ids of the head's `known` ids, from `d2t`, which holds the differences."""
    info = files.tensors.get("d2t")
    if info is None:
        if known != config.vocab_size:
            raise CheckpointError(
                f"{files.names}: tensor d2t is missing, and the head knows {known} of {config.vocab_size} token ids. "
                "Download the weights again"
            )
        return None
    if info.dtype != "I64" or info.shape != (known,):
        raise CheckpointError(
            f"{info.file}: tensor d2t is {info.dtype}{list(info.shape)}, not I64[{known}]. Correct draft_vocab_size "
            "in config.json, or download both again"
        )
    ids = np.arange(known) + files.read("d2t")
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != known:
        raise CheckpointError(
            f"{info.file}: tensor d2t does not give distinct token ids from 0 to {config.vocab_size - 1}. {_OTHER}"
        )
    return ids.astype(np.int32)


def _is_the_model_s(weights: StoredWeights, target: Checkpoint) -> bool:
    """Whether the head's embedding is a copy of the target's, so that one copy is enough."""
    plain = target.config.embedding_multiplier == 1
    same = plain and weights["embed"].shape == target.weights["embed"].shape
    return bool(same and np.array_equal(weights["embed"], target.weights["embed"]))
