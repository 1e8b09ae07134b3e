"""A model of which only config.json is there: enough to know its shapes and to compile its programs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import ChatTemplate
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.model_files import HuggingFaceDirectory, ModelFiles, open_model
from xla_engine.model_loader.safetensors_files import has_weight_files
from xla_engine.model_loader.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class ConfigOnly:
    """`ModelFiles` of a single config.json."""

    path: Path

    def config_fields(self) -> Fields:
        return Fields.of_file(self.path)

    def generation_config(self) -> Fields | None:
        return None

    def tensors(self, names: Iterable[str] = ()) -> TensorFiles:
        raise CheckpointError(
            f"{self.path}: only a configuration, without weights. Name the model's directory"
        )

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        return config, family

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        return None

    def chat_template(self) -> ChatTemplate | None:
        return None

    @property
    def dtype(self) -> str:
        """The engine's dtype if it is left to the checkpoint: as its configuration says."""
        given = self.config_fields().values
        return "float32" if (given.get("dtype") or given.get("torch_dtype")) == "float32" else "bfloat16"


def open_named(model: Path | str) -> ModelFiles:
    """As `open_model`, but a config.json is a `ConfigOnly`."""
    path = Path(model).expanduser()
    return ConfigOnly(path) if path.suffix == ".json" and path.is_file() else open_model(model)


def open_shapes(model: Path | str) -> ModelFiles:
    """As `open_named`, but a directory with a config.json and no weights is a `ConfigOnly`, too."""
    files = open_named(model)
    if isinstance(files, HuggingFaceDirectory) and not has_weight_files(files.path):
        return ConfigOnly(files.path / "config.json")
    return files
