"""Read how a checkpoint pools: its sequence classifier, or the module files of sentence-transformers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.config import OF_EVERY_MODEL, EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.config import LAST, MEAN
from xla_engine.model_loader.families import FAMILIES
from xla_engine.model_loader.json_fields import Fields, read_json
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.utils.shown import shown

Array = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[str], list[int]]  # the token ids of a text, without special ones

MODULES_FILE = "modules.json"
SCORE = "score.weight"  # transformers' classifier over the last token
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_CLASSIFIES = "ForSequenceClassification"
_GENERATES = "ForCausalLM"
# supported modules and pooling modes of sentence-transformers
_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingForm:
    """How a model pools.

    pooling_type: LAST, the last token's vector, or MEAN, the mean over all tokens.
    use_activation: whether embeddings are normalised to length 1, and a classifier's logits go through `activation`.
    dimensions: lengths to which an embedding may be truncated; empty for none, None for any.
    classifier: f32 `[classes, D]`; None if there is none.
    activation: "sigmoid", "softmax" or "identity".
    labels: the name of each class; None if config.json's `id2label` has none for it.
    """

    pooling_type: str = LAST
    use_activation: bool = True
    dimensions: tuple[int, ...] | None = ()
    classifier: Array | None = None
    activation: str = "sigmoid"
    labels: tuple[str | None, ...] = ()


def choose_runner(files: ModelFiles, fields: Fields, options: EngineConfig) -> EngineConfig:
    """The options with runner "auto" resolved to "pooling" if the files, or config.json's `fields`, say so.

    Raises ConfigError for pooling options of a model that does not pool.
    """
    if options.runner == "auto" and _says_it_pools(files, fields):
        options = replace(options, runner="pooling")
    if not options.pools and (options.pooler_config or (options.hf_overrides or {}).keys() - OF_EVERY_MODEL):
        raise ConfigError(
            f"pooler_config, and hf_overrides beside {', '.join(sorted(OF_EVERY_MODEL))}, are for models that "
            'pool: set runner="pooling"'
        )
    return options


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
    values = dict(fields.values)
    twin = _architecture(fields).removesuffix(_CLASSIFIES).removesuffix("Model") + _GENERATES
    if twin in FAMILIES:
        values["architectures"] = [twin]
    if is_headless(files, fields, options):
        values["tie_word_embeddings"] = True
    return Fields(fields.file, values)


def without_head(found: TensorFiles) -> TensorFiles:
    """The decoder's tensors without classifier and output head; adds the name prefix that a bare decoder omits."""
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
    form = PoolingForm(dimensions=_dimensions(fields))
    if _has_modules(files):
        form = _with_modules(form, files.path)
    if _architecture(fields).endswith(_CLASSIFIES):
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
    return replace(form, **(options.pooler_config or {}))


def _says_it_pools(files: ModelFiles, fields: Fields) -> bool:
    name = _architecture(fields)
    bare = name.endswith("Model") and name.removesuffix("Model") + _GENERATES in FAMILIES
    return _has_modules(files) or bare or name.endswith(_CLASSIFIES)


def _has_modules(files: ModelFiles) -> bool:
    return files.path.is_dir() and (files.path / MODULES_FILE).is_file()


def _architecture(fields: Fields) -> str:
    """The architecture that config.json names; empty if it names none, which the reader reports later."""
    names = fields.values.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


def _dimensions(fields: Fields) -> tuple[int, ...] | None:
    if fields.given("matryoshka_dimensions"):
        return fields.token_ids("matryoshka_dimensions", 1 << 24)
    return None if fields.flag("is_matryoshka", default=False) else ()


def _with_modules(form: PoolingForm, directory: Path) -> PoolingForm:
    """The pooling form after sentence-transformers' module files."""
    file = directory / MODULES_FILE
    try:
        modules = json.loads(file.read_bytes())
        kinds = {str(each["type"]).rsplit(".", 1)[-1]: str(each["path"]) for each in modules}
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: not a list of modules ({error!r}). Download the file again"
        ) from error
    for kind in kinds:
        if kind not in _MODULES:
            raise CheckpointError(
                f"{file}: the module {kind!r} is not supported, only {', '.join(_MODULES)} are. Remove {MODULES_FILE} "
                'to use the model without it, with runner="pooling"'
            )
    form = replace(form, use_activation="Normalize" in kinds)
    if "Pooling" not in kinds:
        return form
    if (path := Path(kinds["Pooling"])).is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{file}: the path {str(path)!r} leads out of the model directory. Download the file again"
        )
    fields = Fields(directory / path / "config.json", read_json(directory / path / "config.json"))
    modes = [name.removeprefix("pooling_mode_") for name, value in fields.values.items() if value is True]
    modes = [name for name in modes if f"pooling_mode_{name}" in fields.values]
    if isinstance(mode := fields.values.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{fields.file}: pools by {' and '.join(modes) or 'nothing'}; supported are the last token and the mean. "
            f'Remove {MODULES_FILE} and choose with pooler_config {{"pooling_type": "MEAN"}}'
        )
    return replace(form, pooling_type=_MODES[modes[0]])


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
