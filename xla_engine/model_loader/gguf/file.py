"""A model in one GGUF file."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import SPECIAL_TOKENS, ChatTemplate
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.gguf import config as gguf_config
from xla_engine.model_loader.gguf.reader import GgufReader, GgufWeights
from xla_engine.model_loader.gguf.tokenizer import tokenizer_of
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.tokenizer_json import raising, read_tokenizer

SUFFIX = ".gguf"
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


class GgufFile:
    """`ModelFiles` of a GGUF file. The header is read once, on first use.

    A tokenizer.json next to the file takes precedence over the tokenizer in its metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def reader(self) -> GgufReader:
        """The open file. Raises CheckpointError."""
        return GgufReader(self.path)

    def config_fields(self) -> Fields:
        return gguf_config.config_fields(self.reader)

    def generation_config(self) -> Fields:
        """llama.cpp's sampling defaults in the metadata, as fields of generation_config.json."""
        values = {theirs: self.reader.get(f"general.sampling.{name}") for name, theirs in _SAMPLING.items()}
        return Fields(self.path, values)

    def tensors(self, names: Iterable[str] = ()) -> GgufWeights:
        wanted = list(names)
        return self.reader.weights(gguf_config.tensor_names(self.reader, wanted) if wanted else {})

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        return gguf_config.as_stored(self.reader, config, family)

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
