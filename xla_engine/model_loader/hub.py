"""Models of the Hugging Face hub, through `huggingface_hub` with its cache, settings and token.

A complete snapshot in the cache is used without network access. Only JSON, chat templates and safetensors, or one
GGUF file, are downloaded; never code or pickles.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.file import SUFFIX

_WANTED = ["*.json", "*.safetensors", "*.jinja"]
# copies for other programs, which 1_Pooling is not
_UNWANTED = ["*/*.safetensors", "[!1-9]*/*.json", "consolidated*"]


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
        files = sorted(directory.rglob(f"*{SUFFIX}"))
        return [file for file in files if of_kind.fullmatch(file.name) and not file.name.startswith("mmproj")]

    spelled = {wanted, wanted.upper(), wanted.lower()}
    patterns = [f"*{each}{SUFFIX}" for each in sorted(spelled)]
    directory = _fetch(snapshot_name, patterns, [], lambda there: bool(found(there)))
    match found(directory):
        case [file]:
            return file
        case []:
            raise CheckpointError(
                f"{name}: the repository has no file *{wanted}{SUFFIX} in one part, or the hub cannot be reached. The "
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
