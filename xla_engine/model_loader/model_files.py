"""The files of a model, in any form: a Hugging Face directory, a hub snapshot, a GGUF file, an installed package."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.gguf.file import SUFFIX, GgufFile
from xla_engine.model_loader.hub import gguf_file, snapshot
from xla_engine.model_loader.huggingface import HuggingFaceDirectory
from xla_engine.model_loader.installed_package import PREFIX, model_in_package
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.tensor_files import TensorFiles

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(?P<gguf>:[\w.-]+)?", re.ASCII)


class ModelFiles(Protocol):
    """The files of one model. Each method reads files, and raises CheckpointError naming file and remedy."""

    @property
    def path(self) -> Path:
        """The directory or file."""

    def config_fields(self) -> Fields:
        """The model's configuration as fields of config.json."""

    def generation_config(self) -> Fields | None:
        """Sampling defaults and eos ids as fields of generation_config.json; None if there are none."""

    def tensors(self, names: Iterable[str] = ()) -> TensorFiles:
        """The weight files, mapped. Tensors in `names` have transformers' names; others may keep the file's.

        Without names, they are as stored, even if they are quantised.
        """

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        """The configuration and the family, adapted to how these files store the weights."""

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer; None if there is none."""

    def chat_template(self) -> ChatTemplate | None:
        """The chat templates; None if there are none."""


def open_model(model: ModelFiles | Path | str) -> ModelFiles:
    """Open the model that `model` names. A `ModelFiles` is returned unchanged.

    A path is a model directory or a .gguf file. "OWNER/NAME", optionally with "@REVISION", is an id of the Hugging
    Face hub unless such a path exists; its snapshot is taken from the local cache or downloaded. With ":Q8_0" or
    another quantisation it is the GGUF file of that type. "package:NAME" is the model inside an installed Python
    package (`model_in_package`). Raises CheckpointError.
    """
    if not isinstance(model, Path | str):
        return model
    if str(model).startswith(PREFIX):
        return open_model(model_in_package(str(model)))
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return HuggingFaceDirectory(path)
        found, gguf = path.exists(), path.suffix.lower() == SUFFIX
        if gguf and path.is_file():
            return GgufFile(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{model!r} is not a usable path ({error}). Name a model directory") from error
    if found:
        raise CheckpointError(
            f"{path}: not a directory. Name the directory that holds config.json, or a .gguf file"
        )
    if not gguf and (name := _HUB_ID.fullmatch(str(model))):
        return GgufFile(gguf_file(name[0])) if name["gguf"] else HuggingFaceDirectory(snapshot(name[0]))
    raise CheckpointError(
        f"{path}: no such directory. Name a local model directory, a .gguf file, an id of the Hugging Face hub "
        "(OWNER/NAME, or OWNER/NAME:Q8_0 for a GGUF file), or package:NAME"
    )
