"""Read how a checkpoint pools: its sequence classifier, or the module files of sentence-transformers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.config import OF_EVERY_MODEL, EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import CLS, LAST, MEAN, POOLING_TYPES, ModelConfig
from xla_engine.model_loader.families import ENCODERS, FAMILIES, encoder_fields, encoder_of
from xla_engine.model_loader.families.encoders import HEADS, PREFIXES
from xla_engine.model_loader.families.family import sees_later_tokens
from xla_engine.model_loader.gguf.architectures import GGUF_DENSE, GGUF_POOLING
from xla_engine.model_loader.json_fields import Fields, read_json
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.model_loader.safetensors_files import open_weight_files
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.utils.shown import shown

Array = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[str], list[int]]  # the token ids of a text, without special ones

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"  # of sentence-transformers: how many tokens of a text are read
SCORE = "score.weight"  # transformers' classifier over the last token
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_MODERNBERT = "model.embeddings.tok_embeddings.weight"  # beside a head
_CLASSIFIES = "ForSequenceClassification"
_GENERATES = "ForCausalLM"
# Supported modules and pooling modes of sentence-transformers.
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_MODES = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN, "cls": CLS, "cls_token": CLS}
# Activations of torch by the last part of their name.
_TORCH = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu"}
_ACTIVATION_FIELDS = ("activation_fn", "sbert_ce_default_activation_function")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """A layer between a pooled vector and what is made of it: `activation(weight x + bias)`.

    weight: f32 `[F, D]`. bias: f32 `[F]`. activation: "identity", "tanh", "sigmoid", "relu" or "gelu".
    norm: weight and bias, f32 `[F]`, of a LayerNorm behind it. norm_eps: its epsilon.
    """

    weight: Array
    bias: Array
    activation: str
    norm: tuple[Array, Array] | None = None
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingForm:
    """How a model pools.

    pooling_type: LAST, the last token's vector, MEAN, the mean over all tokens, or CLS, the first token's vector.
    dense: layers that the vector goes through, in order. token_types: of an encoder; 1 in other models.
    use_activation: whether embeddings are normalised to length 1, and a classifier's logits go through `activation`.
    dimensions: lengths to which an embedding may be truncated; empty for none, None for any.
    classifier: f32 `[classes, D]`; None if there is none. classifier_bias: f32 `[classes]`; None: none.
    activation: "sigmoid", "softmax" or "identity".
    labels: the name of each class; None if config.json's `id2label` has none for it.
    """

    pooling_type: str = LAST
    use_activation: bool = True
    dimensions: tuple[int, ...] | None = ()
    classifier: Array | None = None
    activation: str = "sigmoid"
    labels: tuple[str | None, ...] = ()
    dense: tuple[Dense, ...] = ()
    token_types: int = 1
    classifier_bias: Array | None = None

    def size(self, hidden_size: int) -> int:
        """The length of an embedding of a model with this `hidden_size`."""
        return len(self.dense[-1].bias) if self.dense else hidden_size


def choose_runner(files: ModelFiles, fields: Fields, options: EngineConfig) -> EngineConfig:
    """The options with runner "auto" resolved to "pooling" if the files, or config.json's `fields`, say so.

    Raises ConfigError for pooling options of a model that does not pool.
    """
    fields, encodes = _named(fields), _encodes(fields)
    if encodes and options.runner == "generate":
        raise ConfigError('this model is an encoder, which generates no text: use runner="pooling"')
    if options.runner == "auto" and (encodes or _says_it_pools(files, fields)):
        options = replace(options, runner="pooling")
    if encodes and options.max_model_len is None and (length := _text_length(files, fields)) is not None:
        options = replace(options, max_model_len=length)
    if not options.pools and (options.pooler_config or (options.hf_overrides or {}).keys() - OF_EVERY_MODEL):
        raise ConfigError(
            f"pooler_config, and hf_overrides beside {', '.join(sorted(OF_EVERY_MODEL))}, are for models that "
            'pool: set runner="pooling"'
        )
    return options


def default_task(fields: Fields) -> str:
    """What a model that pools computes of a text if nobody says: "classify" or "embed"."""
    return "classify" if _architecture(fields).endswith(_CLASSIFIES) else "embed"


def encoder_options(options: EngineConfig, config: ModelConfig) -> EngineConfig:
    """The options, in which `max_model_len` None became the limit of an encoder, whose texts need no memory."""
    if not config.encodes or options.max_model_len is not None:
        return options
    return replace(options, max_model_len=config.max_position_embeddings)


def is_headless(files: ModelFiles, fields: Fields, options: EngineConfig) -> bool:
    """Whether the output head is not loaded, because no token is sampled."""
    return options.pools and files.path.is_dir() and "text_config" not in fields.values


def decoder_fields(files: ModelFiles, fields: Fields, options: EngineConfig) -> Fields:
    """config.json of a pooling model, as that of a decoder.

    The architecture of a classifier or bare decoder becomes its family's, and a head that is not loaded counts as
    tied.
    """
    if not options.pools:
        return fields
    if (encoder := encoder_of(_architecture(fields))) is not None:
        return encoder_fields(fields, encoder)
    values = dict(fields.values)
    twin = _architecture(fields).removesuffix(_CLASSIFIES).removesuffix("Model") + _GENERATES
    if twin in FAMILIES:
        values["architectures"] = [twin]
    if is_headless(files, fields, options):
        values["tie_word_embeddings"] = True
    return Fields(fields.file, values)


def without_head(found: TensorFiles) -> TensorFiles:
    """The model's tensors without classifier and output head, with the names of its family.

    A bare decoder omits a prefix; an encoder beside a head has one, and old ones have other names for norms.
    """
    prefixes = (*PREFIXES, "model.") if _MODERNBERT in found.tensors else PREFIXES
    for name in list(found.tensors):
        if (plain := _plain_name(name, prefixes)) != name:
            found.tensors[plain] = found.tensors.pop(name)
    for name in (SCORE, _HEADS[0]):
        found.tensors.pop(name, None)
    if "embed_tokens.weight" in found.tensors:
        for name in list(found.tensors):
            found.tensors[f"model.{name}"] = found.tensors.pop(name)
    return found


def read_pooling(
    files: ModelFiles, fields: Fields, options: EngineConfig, encode: Encode | None
) -> PoolingForm | None:
    """How the model pools, given the options from `choose_runner`; None for a generative model.

    encode: None if the model has no tokenizer. Raises CheckpointError, and ConfigError for options that do not fit
    the model.
    """
    if not options.pools:
        return None
    fields, encodes = _named(fields), _encodes(fields)
    form = PoolingForm(dimensions=_dimensions(fields))
    encoder = encoder_of(_architecture(fields))
    if encoder is not None:
        default = ENCODERS[encoder].defaults.get("type_vocab_size", 2)
        types = fields.integer("type_vocab_size", low=0, high=2**20, default=default)
        form = replace(form, pooling_type=CLS, token_types=max(types, 1))
    elif encodes:
        form = replace(form, pooling_type=MEAN)
    if _has_modules(files):
        form = _with_modules(form, files.path, encodes=encodes)
    if files.path.is_file() and (names := fields.values.get(GGUF_DENSE)):
        form = replace(form, dense=_dense_layers(files.tensors(), names, fields))
    if (told := fields.values.get(GGUF_POOLING)) in POOLING_TYPES:
        form = replace(form, pooling_type=told)
    if encoder is not None and _architecture(fields).endswith(_CLASSIFIES):
        form = _with_encoder_head(form, files, fields, encoder)
    elif _architecture(fields).endswith(_CLASSIFIES):
        classifier = _from_tokens(files, fields, encode)
        if classifier is None:
            classifier = _classifier(files, fields)
        classes = len(classifier)
        form = replace(
            form,
            classifier=classifier,
            activation=_activation(fields, classes),
            labels=_labels(fields, classes),
        )
    form = replace(form, **(options.pooler_config or {}))
    if form.pooling_type == CLS and not encodes:
        raise ConfigError(
            "pooling_type CLS is for encoders: a decoder's first token has read no other. Use LAST or MEAN"
        )
    return form


def _says_it_pools(files: ModelFiles, fields: Fields) -> bool:
    name = _architecture(fields)
    bare = name.endswith("Model") and not {name, name.removesuffix("Model") + _GENERATES}.isdisjoint(FAMILIES)
    says = _has_modules(files) or fields.given(GGUF_POOLING)
    return says or bare or name.endswith(_CLASSIFIES)


def _has_modules(files: ModelFiles) -> bool:
    return files.path.is_dir() and (files.path / MODULES_FILE).is_file()


def _encodes(fields: Fields) -> bool:
    """Whether every token attends to all others, so that the model generates nothing."""
    return encoder_of(_architecture(fields)) is not None or sees_later_tokens(fields)


def _named(fields: Fields) -> Fields:
    """An encoder's fields with the names that the loader reads, and its own architecture."""
    encoder = encoder_of(name := _architecture(fields))
    if encoder is None:
        return fields
    return Fields(fields.file, {**encoder_fields(fields, encoder).values, "architectures": [name]})


def _architecture(fields: Fields) -> str:
    """The architecture that config.json names; empty if it names none, which the reader reports later."""
    names = fields.values.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


def _text_length(files: ModelFiles, fields: Fields) -> int | None:
    """The most tokens of a text by sentence-transformers' files; None if they do not say, or say more than fit."""
    if not files.path.is_dir() or not (file := files.path / LENGTH_FILE).is_file():
        return None
    lengths = Fields(file, read_json(file))
    most = fields.integer("max_position_embeddings", high=2**31 - 1, default=512)
    if not lengths.given("max_seq_length"):
        return None
    length = lengths.integer("max_seq_length", low=2, high=2**31 - 1)
    return length if length < most - 2 else None  # RoBERTa's table has two more rows than a text has tokens


def _plain_name(name: str, prefixes: tuple[str, ...]) -> str:
    """The name of a tensor in an encoder's family; that of any other as it is."""
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.replace(old, new)
    return name


def _dimensions(fields: Fields) -> tuple[int, ...] | None:
    if fields.given("matryoshka_dimensions"):
        return fields.token_ids("matryoshka_dimensions", 1 << 24)
    return None if fields.flag("is_matryoshka", default=False) else ()


def _with_modules(form: PoolingForm, directory: Path, *, encodes: bool) -> PoolingForm:
    """The pooling form after sentence-transformers' module files. encodes: whether the model is an encoder."""
    file = directory / MODULES_FILE
    try:
        modules = json.loads(file.read_bytes())
        named = [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: not a list of modules ({error!r}). Download the file again"
        ) from error
    kinds = dict(named)
    for kind, place in named:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise CheckpointError(
                f"{file}: the path {place!r} leads out of the model directory. Download the file again"
            )
        if kind not in _MODULES:
            raise CheckpointError(
                f"{file}: the module {kind!r} is not supported, only {', '.join(_MODULES)} are. Remove {MODULES_FILE} "
                'to use the model without it, with runner="pooling"'
            )
    form = replace(
        form,
        use_activation="Normalize" in kinds,
        dense=tuple(_dense(directory / place) for kind, place in named if kind == "Dense"),
    )
    if "Pooling" not in kinds:
        return form
    path = directory / kinds["Pooling"] / "config.json"
    fields = Fields(path, read_json(path))
    modes = [name.removeprefix("pooling_mode_") for name, value in fields.values.items() if value is True]
    modes = [name for name in modes if f"pooling_mode_{name}" in fields.values]
    if isinstance(mode := fields.values.get("pooling_mode"), str):
        modes = [mode]
    supported = {name: kind for name, kind in _MODES.items() if encodes or kind != CLS}
    if len(modes) != 1 or modes[0] not in supported:
        first = "the first token, " if encodes else ""
        raise CheckpointError(
            f"{fields.file}: pools by {' and '.join(modes) or 'nothing'}; supported are {first}the last token and the "
            f'mean. Remove {MODULES_FILE} and choose with pooler_config {{"pooling_type": "MEAN"}}'
        )
    return replace(form, pooling_type=_MODES[modes[0]])


def _dense(directory: Path) -> Dense:
    """A Dense module of sentence-transformers."""
    fields = Fields(directory / "config.json", read_json(directory / "config.json"))
    name = str(fields.values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if (activation := _TORCH.get(name.rpartition(".")[2])) is None:
        fields.fail("activation_function", f"not supported. Supported are {', '.join(_TORCH)}")
    found = open_weight_files(directory)
    return _layer(found, "linear", fields.integer("in_features", high=2**24), activation)


def _dense_layers(found: TensorFiles, names: list[str], fields: Fields) -> tuple[Dense, ...]:
    """Layers of a GGUF file behind the pooling: products without biases. Raises CheckpointError."""
    layers: list[Dense] = []
    for name in names:
        width = len(layers[-1].bias) if layers else fields.integer("hidden_size", high=2**20)
        layers.append(_layer(found, name, width, "identity"))
    return tuple(layers)


def _layer(found: TensorFiles, name: str, width: int, activation: str) -> Dense:
    """A layer with `width` inputs, whose bias may be missing. Raises CheckpointError."""
    weight = _tensor(found, f"{name}.weight")
    if weight.ndim != 2 or weight.shape[1] != width:
        raise CheckpointError(
            f"{found.names}: tensor {name}.weight has shape {list(weight.shape)}, but [features, {width}] is "
            "expected. Correct config.json, or download both again"
        )
    bias: Array = np.zeros(len(weight), np.float32)
    if f"{name}.bias" in found.tensors:
        bias = _tensor(found, f"{name}.bias")
    if bias.shape != (len(weight),):
        raise CheckpointError(
            f"{found.names}: tensor {name}.bias has shape {list(bias.shape)}, but {[len(weight)]} is expected. "
            "Download the weights again"
        )
    return Dense(weight=weight, bias=bias, activation=activation)


def _tensor(found: TensorFiles, name: str) -> Array:
    if name not in found.tensors:
        raise CheckpointError(f"{found.names}: tensor {name} is missing. Download the weights again")
    return found.read(name).astype(np.float32)


def _with_encoder_head(form: PoolingForm, files: ModelFiles, fields: Fields, encoder: str) -> PoolingForm:
    """The pooling form of the sequence classifier of `encoder`: a token or the mean, a layer, and the classes."""
    head = HEADS[encoder]
    names = [
        f"{name}.{part}" for name in (head.layer, head.norm, head.classes) for part in ("weight", "bias")
    ]
    found = without_head(files.tensors(() if files.path.is_dir() else names))
    width = fields.integer("hidden_size", high=2**20)
    hidden = _layer(found, head.layer, width, head.activation)
    if head.norm:
        shift = np.zeros(len(hidden.bias), np.float32)
        if f"{head.norm}.bias" in found.tensors:
            shift = _tensor(found, f"{head.norm}.bias")
        eps = fields.number("layer_norm_eps", high=1.0, default=1e-5)
        hidden = replace(hidden, norm=(_tensor(found, f"{head.norm}.weight"), shift), norm_eps=eps)
    last = _layer(found, head.classes, len(hidden.bias), "identity")
    classes = len(last.bias)
    pooled = fields.values.get("classifier_pooling") or "cls"
    if pooled not in _MODES:
        fields.fail("classifier_pooling", f"not supported. Supported are {', '.join(_MODES)}")
    if fields.values.get("classifier_activation") not in (None, "gelu"):
        fields.fail("classifier_activation", "not supported. Use a checkpoint with gelu")
    return replace(
        form,
        pooling_type=_MODES[pooled],
        use_activation=True,
        dense=(hidden,),
        classifier=last.weight,
        classifier_bias=last.bias,
        activation=_cross_encoder_activation(fields) or _activation(fields, classes),
        labels=_labels(fields, classes),
    )


def _cross_encoder_activation(fields: Fields) -> str | None:
    """The activation that sentence-transformers' CrossEncoder wrote into config.json; None if it wrote none."""
    own = fields.values.get("sentence_transformers")
    for source in (own if isinstance(own, dict) else {}, fields.values):
        for name in _ACTIVATION_FIELDS:
            if (value := source.get(name)) is None:
                continue
            if (found := _TORCH.get(str(value).rpartition(".")[2])) in ("identity", "sigmoid"):
                return found
            fields.fail(name, "not supported. Use Identity or Sigmoid, or leave it out")
    return None


def _classifier(files: ModelFiles, fields: Fields) -> Array:
    found = files.tensors((SCORE,))
    if SCORE not in found.tensors:
        raise CheckpointError(f"{found.names}: tensor {SCORE} is missing. Download the weights again")
    weight = found.read(SCORE).astype(np.float32)
    hidden = fields.integer("hidden_size", high=2**20)
    if weight.ndim != 2 or weight.shape[1] != hidden:
        raise CheckpointError(
            f"{found.names}: tensor {SCORE} has shape {list(weight.shape)}, but [classes, {hidden}] is expected. "
            "Correct config.json, or download both again"
        )
    return weight


def _from_tokens(files: ModelFiles, fields: Fields, encode: Encode | None) -> Array | None:
    """A classifier from rows of the output head, as in Qwen3-Reranker: the logit of "yes" minus that of "no"."""
    tokens = fields.values.get("classifier_from_token")
    if tokens is None:
        return None
    whole = isinstance(tokens, list | tuple) and all(isinstance(token, str) for token in tokens)
    if encode is None or not whole or not tokens:
        raise ConfigError(
            f"classifier_from_token must be a list of tokens of the model's tokenizer, not {shown(tokens)}"
        )
    ids = [encode(token) for token in tokens]
    if any(len(each) != 1 for each in ids):
        raise ConfigError(f"classifier_from_token {shown(tokens)}: each must be one token of the model")
    found = files.tensors(_HEADS)
    head = next(
        (name for name in (*_HEADS, "embed_tokens.weight") if name in found.tensors), "embed_tokens.weight"
    )
    rows = found.rows(head, np.array([token for (token,) in ids])).astype(np.float32)
    if not fields.flag("is_original_qwen3_reranker", default=False):
        return rows
    if len(rows) != 2:
        raise ConfigError('is_original_qwen3_reranker needs classifier_from_token ["no", "yes"]')
    return rows[1:] - rows[:1]


def _activation(fields: Fields, classes: int) -> str:
    """The activation that transformers' fields name, else vLLM's default."""
    named = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return named.get(str(fields.values.get("problem_type")), "sigmoid" if classes == 1 else "softmax")


def _labels(fields: Fields, classes: int) -> tuple[str | None, ...]:
    """`id2label`; by default transformers' names of classes, as in vLLM."""
    if not fields.given("id2label"):
        return tuple(f"LABEL_{number}" for number in range(classes))
    found = fields.values["id2label"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(
            f"{fields.file}: id2label must be an object of class numbers and names, not {shown(found)}. Correct it, "
            "or leave it out"
        )
    return tuple(found.get(str(number)) for number in range(classes))
