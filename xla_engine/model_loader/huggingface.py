"""A model in a Hugging Face directory: JSON files, safetensors, chat templates."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import MAX_TEMPLATE, SPECIAL_TOKENS, ChatTemplate
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.json_fields import Fields, read_json
from xla_engine.model_loader.quantised.methods import dequantised, quantisation_fields
from xla_engine.model_loader.safetensors_files import open_weight_files
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.model_loader.tokenizer_json import read_tokenizer


@dataclass(frozen=True, slots=True)
class HuggingFaceDirectory:
    """`ModelFiles` of a directory in transformers' layout; files are read lazily."""

    path: Path

    def config_fields(self) -> Fields:
        return Fields.of_file(self.path / "config.json")

    def generation_config(self) -> Fields | None:
        file = self.path / "generation_config.json"
        return Fields.of_file(file) if file.exists() else None

    def tensors(self, names: Iterable[str] = ()) -> TensorFiles:
        """The weight files; with names, quantised weights are dequantised when they are read."""
        files, wanted = open_weight_files(self.path), set(names)
        fields = quantisation_fields(self.config_fields()) if wanted else None
        return files if fields is None else dequantised(files, fields, wanted)

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        return config, family

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        return read_tokenizer(self.path)

    def chat_template(self) -> ChatTemplate | None:
        """As in transformers, `chat_template.jinja` and `additional_chat_templates/*.jinja` override the processor's
        `chat_template.json`, and that one tokenizer_config.json."""
        config, tokens, processor = (
            read_json(file) if (file := self.path / name).is_file() else {}
            for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
        )
        sources = (
            _template_files(self.path)
            or _template_entries(processor.get("chat_template"), self.path / "chat_template.json")
            or _template_entries(config.get("chat_template"), self.path / "tokenizer_config.json")
        )
        if not sources:
            return None
        return ChatTemplate(sources=sources, special_tokens=_special_tokens(tokens | config))


def _template_files(directory: Path) -> dict[str, str]:
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        named["default"] = default
    return {name: _read_template(file) for name, file in named.items()}


def _read_template(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_TEMPLATE:
            raise CheckpointError(f"{file}: larger than {MAX_TEMPLATE >> 20} MiB. Download the file again")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Download the file again") from error


def _template_entries(value: Any, file: Path) -> dict[str, str]:
    """`chat_template` of a JSON file: text, or a list of {"name", "template"}."""
    if value is None:
        return {}
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in entries
    ):
        raise CheckpointError(
            f"{file}: chat_template must be text or a list of names and templates. Download the file again"
        )
    return {entry["name"]: entry["template"] for entry in entries}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
