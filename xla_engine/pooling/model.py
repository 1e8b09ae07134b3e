"""How a checkpoint pools: its sequence classifier, and the files that sentence-transformers lays beside a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xla_engine.checks.pooling import OF_EVERY_MODEL
from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.graphs.steps.pooling import LAST, MEAN
from xla_engine.model_loader.families import FAMILIES
from xla_engine.model_loader.json_fields import Fields, read_json
from xla_engine.model_loader.model_files import ModelFiles, OverriddenFiles, overridden
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.pooling.pooler import Array, Pooler
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.shown import shown

MODULES_FILE = "modules.json"
SCORE = "score.weight"  # transformers' classifier over the last token
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_CLASSIFIES = "ForSequenceClassification"
_GENERATES = "ForCausalLM"
# sentence-transformers' modules and ways to pool that are built in
_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}


class PoolingFiles(OverriddenFiles):
    """The files of a model as those of a decoder without a head: what else pooling needs is read apart.

    A classifier's architecture, or that of a bare decoder, is read as the family's; names of tensors get the prefix
    that a bare decoder leaves out. An output head is left out, as no token is sampled.
    """

    __slots__ = ()

    def config_fields(self) -> Fields:
        fields = fields_of(self.files, self.overrides)
        name = _architecture(fields)
        twin = name.removesuffix(_CLASSIFIES).removesuffix("Model") + _GENERATES
        values = dict(fields.values)
        if twin in FAMILIES:
            values["architectures"] = [twin]
        if self._without_head(fields):
            values["tie_word_embeddings"] = True
        return Fields(fields.file, values)

    def tensors(self, names: Iterable[str] = ()) -> TensorFiles:
        found = self.files.tensors(names)
        if not self._without_head(self.files.config_fields()):
            return found
        for name in (SCORE, _HEADS[0]):
            found.tensors.pop(name, None)
        if "embed_tokens.weight" in found.tensors:
            for name in list(found.tensors):
                found.tensors[f"model.{name}"] = found.tensors.pop(name)
        return found

    def _without_head(self, fields: Fields) -> bool:
        return self.path.is_dir() and "text_config" not in fields.values


def fields_of(files: ModelFiles, overrides: Mapping[str, Any]) -> Fields:
    """config.json with `hf_overrides`."""
    return overridden(files.config_fields(), overrides)


def for_runner(files: ModelFiles, config: EngineConfig) -> tuple[ModelFiles, EngineConfig]:
    """The files as the runner reads them that `config` asks for, and the options with that runner."""
    overrides = config.hf_overrides or {}
    if config.runner == "auto" and _says_it_pools(files, overrides):
        config = replace(config, runner="pooling")
    if config.runner != "pooling":
        if config.pooler_config or overrides.keys() - OF_EVERY_MODEL:
            raise ConfigError(
                f"pooler_config, and hf_overrides beside {', '.join(sorted(OF_EVERY_MODEL))}, are for models that "
                'pool: set runner="pooling"'
            )
        return OverriddenFiles(files, overrides) if overrides else files, config
    return PoolingFiles(files, overrides), config


def load_pooler(files: ModelFiles, tokenizer: Tokenizer | None, config: EngineConfig) -> Pooler | None:
    """How the model pools that `for_runner` gave the files of; None where it generates.

    Raises CheckpointError, and ConfigError for options that the model contradicts.
    """
    if not isinstance(files, PoolingFiles):
        return None
    fields = fields_of(files.files, files.overrides)
    pooler = Pooler(dimensions=_dimensions(fields))
    if files.path.is_dir() and (files.path / MODULES_FILE).is_file():
        pooler = _with_modules(pooler, files.path)
    if _architecture(fields).endswith(_CLASSIFIES):
        classifier = _from_tokens(files.files, fields, tokenizer)
        if classifier is None:
            classifier = _classifier(files.files, fields)
        pooler = replace(pooler, classifier=classifier, activation=_activation(fields, len(classifier)))
    return replace(pooler, **(config.pooler_config or {}))


def _says_it_pools(files: ModelFiles, overrides: Mapping[str, Any]) -> bool:
    if files.path.is_dir() and (files.path / MODULES_FILE).is_file():
        return True
    name = _architecture(fields_of(files, overrides))
    bare = name.endswith("Model") and name.removesuffix("Model") + _GENERATES in FAMILIES
    return bare or name.endswith(_CLASSIFIES)


def _architecture(fields: Fields) -> str:
    """The one architecture that config.json names; empty where it names none, which the reader reports."""
    names = fields.values.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


def _dimensions(fields: Fields) -> tuple[int, ...] | None:
    if fields.given("matryoshka_dimensions"):
        return fields.token_ids("matryoshka_dimensions", 1 << 24)
    return None if fields.flag("is_matryoshka", default=False) else ()


def _with_modules(pooler: Pooler, directory: Path) -> Pooler:
    """What sentence-transformers would do with the vectors of the tokens."""
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
                f"{file}: the module {kind!r} is not built in, only {', '.join(_MODULES)} are. Remove {MODULES_FILE} "
                'to use the model without it, with runner="pooling"'
            )
    pooler = replace(pooler, use_activation="Normalize" in kinds)
    if "Pooling" not in kinds:
        return pooler
    if (path := Path(kinds["Pooling"])).is_absolute() or ".." in path.parts:
        raise CheckpointError(f"{file}: the path {str(path)!r} leads elsewhere. Download the file again")
    fields = Fields(directory / path / "config.json", read_json(directory / path / "config.json"))
    modes = [name.removeprefix("pooling_mode_") for name, value in fields.values.items() if value is True]
    modes = [name for name in modes if f"pooling_mode_{name}" in fields.values]
    if isinstance(mode := fields.values.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{fields.file}: pools by {' and '.join(modes) or 'nothing'}; built in are the last token and the mean. "
            f'Remove {MODULES_FILE} and choose with pooler_config {{"pooling_type": "MEAN"}}'
        )
    return replace(pooler, pooling_type=_MODES[modes[0]])


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


def _from_tokens(files: ModelFiles, fields: Fields, tokenizer: Tokenizer | None) -> Array | None:
    """A classifier made of rows of the output head, as Qwen3-Reranker is one: how much likelier "yes" is than "no"."""
    tokens = fields.values.get("classifier_from_token")
    if tokens is None:
        return None
    whole = isinstance(tokens, list | tuple) and all(isinstance(token, str) for token in tokens)
    if tokenizer is None or not whole or not tokens:
        raise ConfigError(
            f"classifier_from_token must be a list of tokens of the model's tokenizer, not {shown(tokens)}"
        )
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in tokens]
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
    """As transformers says it, else as vLLM takes it."""
    named = {
        "regression": "identity",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    return named.get(str(fields.values.get("problem_type")), "sigmoid" if classes == 1 else "softmax")
